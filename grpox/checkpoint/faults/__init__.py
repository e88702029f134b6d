"""Numbers that are not finite: what the run does about them, the batch kept, and seen again."""

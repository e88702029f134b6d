"""`grpox runs`: tracked runs, read back from MLflow. Importing its commands imports nothing heavy."""

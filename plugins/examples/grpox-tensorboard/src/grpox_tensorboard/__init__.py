"""TensorBoard as an observer of grpox's runs."""

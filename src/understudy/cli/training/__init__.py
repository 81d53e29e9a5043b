"""Commands that train and evaluate policies."""

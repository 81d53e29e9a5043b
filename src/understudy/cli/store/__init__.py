"""Commands on stores and data sets."""

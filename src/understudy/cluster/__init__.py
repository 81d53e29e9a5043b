"""The same run on many machines: the roles of `training`, placed by Ray. The only package that imports ray."""

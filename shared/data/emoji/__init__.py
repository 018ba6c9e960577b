"""``emoji:`` images of the same things by many designers: styles, things, splits, and the build of the data set."""

"""``emoji:`` the same things as many designers drew them: styles, things, splits, and the build of the whole set."""

"""``emoji:`` images of the same things by several designers, as files: styles, splits and the sources."""

"""The commands: every module here registers its own with `promptfed.cli.app`."""

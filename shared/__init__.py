"""What coordinator, client and command share."""

__version__ = "0.4.0"  # of the package, the images and the release: written here alone

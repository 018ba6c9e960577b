"""What coordinator, client and command share."""

__version__ = "0.4.0"  # of the package, the images and the release: written here alone


def get_extra(name: str) -> str:
    """How an extra is installed, for every error that asks for one; docs/guides/install.md tells of the wheel."""
    wheel = f"promptfed-{__version__}-py3-none-any.whl[{name}]"
    return f"install promptfed[{name}]: pip install '{wheel}' (`make dist` makes this file)"

"""``python -m promptfed``: the command, where its script is not on the path."""

from promptfed.cli.main import command

if __name__ == "__main__":
    command()

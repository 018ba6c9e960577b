"""What the coordinator answers about federations: pydantic models and how they are made."""

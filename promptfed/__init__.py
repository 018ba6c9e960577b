"""The ``promptfed`` command: the demo, the services, and control of federations over the coordinator's API."""

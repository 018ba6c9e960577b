"""Clients: their tokens of enrolment, enrolment, withdrawal and reset, and how operators see them."""

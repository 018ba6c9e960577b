"""Secure aggregation: the coordinator learns the sum of the clients' vectors and no single vector.

Sources: Bonawitz et al., "Practical Secure Aggregation", 2017. The package holds pure functions of keys, shares, masks
and messages, without I/O; the services store and send the messages. Key agreement, key derivation, stream cipher,
encryption and signatures come from ``cryptography``. Every secret comes from the operating system's randomness; no
statistical generator is imported here.
"""

MOST_CLIENTS = 1024  # of a sum, which is exact up to so many


class SecureError(ValueError):
    """A received message cannot be used. ``kind`` is the failure type that the coordinator receives."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind

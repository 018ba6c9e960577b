"""Secure aggregation: a sum of vectors that whoever adds them up sees none of.

Bonawitz et al., "Practical Secure Aggregation", 2017, on the sparse graphs of Bell et al., 2020. Pure functions of
keys, shares, masks and messages, without I/O; the services keep and send. Key agreement, key derivation, stream cipher,
encryption and signatures are those of ``cryptography``. Every secret comes from the operating system: no generator for
statistics is imported here.
"""


class SecureError(ValueError):
    """What another side sent cannot be used. ``kind`` is the type of the failure that the coordinator is told."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind

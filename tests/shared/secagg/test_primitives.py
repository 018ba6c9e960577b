"""Published vectors through our functions, and slow literal versions beside them."""

from __future__ import annotations

import ast
import hashlib
import hmac
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import promptfed.shared.secagg as package
from promptfed.shared.secagg import SecureError, primitives


def test_x25519_is_that_of_rfc_7748() -> None:
    private = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    expected = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert primitives.agree(private, point).hex() == expected


def test_a_key_of_small_order_is_refused() -> None:
    with pytest.raises(SecureError) as refused:
        primitives.agree(primitives.new_pair(), bytes(32))
    assert refused.value.kind == "bad-roster"


def test_identities_are_those_of_rfc_8032() -> None:
    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert primitives.public_identity(private).hex() == public
    assert primitives.fingerprint(bytes.fromhex(public)) == f"ed25519:{public}"


def test_a_signature_is_for_one_purpose_and_one_body() -> None:
    private = primitives.new_identity()
    public, signature = primitives.public_identity(private), primitives.sign(private, "keys", {"a": 1})
    assert primitives.is_signed(public, signature, "keys", {"a": 1})
    assert not primitives.is_signed(public, signature, "confirm", {"a": 1})
    assert not primitives.is_signed(public, signature, "keys", {"a": 2})
    assert not primitives.is_signed(public, signature[:-1] + bytes([signature[-1] ^ 1]), "keys", {"a": 1})
    assert not primitives.is_signed(primitives.public_identity(primitives.new_identity()), signature, "keys", {"a": 1})


def test_words_are_chacha20_s_of_rfc_8439() -> None:
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a37"
    assert primitives.words(bytes(32), 6).astype("<u8").tobytes().hex() == expected


def literal_hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 word for word."""
    prk, okm, block, number = hmac.digest(salt, secret, "sha256"), b"", b"", 1
    while len(okm) < length:
        block = hmac.digest(prk, block + info + bytes([number]), "sha256")
        okm, number = okm + block, number + 1
    return okm[:length]


def test_derived_keys_are_those_of_rfc_5869() -> None:
    published = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    info = bytes(range(0xF0, 0xFA))
    assert literal_hkdf(b"\x0b" * 22, bytes(range(13)), info, 42).hex() == published
    expected = literal_hkdf(b"secret", b"salt" * 8, b"promptfed/mask/1\0" + b"first" + b"second", 32)
    assert primitives.derive(b"secret", "mask", b"salt" * 8, b"first", b"second") == expected
    others = {primitives.derive(b"secret", purpose, b"salt" * 8) for purpose in ("self", "mask", "share")}
    assert len(others) == 3


def is_prime(n: int) -> bool:
    """Miller and Rabin's test with the first forty primes as bases."""
    bases = [p for p in range(2, 174) if all(p % q for q in range(2, p))]
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return len(bases) == 40


def test_the_field_is_one() -> None:
    assert is_prime(primitives.PRIME)
    assert not is_prime(primitives.PRIME - 2)
    assert primitives.PRIME > 1 << 256


def test_any_threshold_of_shares_opens_the_secret_and_fewer_say_nothing() -> None:
    secret = bytes(range(32))
    shares = primitives.split(secret, 3, range(1, 6))
    for some in combinations(shares, 3):
        assert primitives.combine({place: shares[place] for place in some}) == secret
    assert primitives.combine(shares) == secret
    # With one share less every secret is as likely: for each there is just one polynomial through what is known.
    known = {place: primitives.share_value(shares[place]) for place in (2, 5)}
    for guess in (bytes(32), b"\xff" * 32):
        third = interpolated({0: int.from_bytes(guess, "big"), **known}, 3).to_bytes(33, "big")
        assert primitives.combine({2: shares[2], 5: shares[5], 3: third}) == guess


def interpolated(points: dict[int, int], at: int) -> int:
    """Lagrange's polynomial through ``points``, word for word."""
    total = 0
    for x, y in points.items():
        term = y
        for other in points:
            if other != x:
                term = term * (at - other) * pow(x - other, -1, primitives.PRIME) % primitives.PRIME
        total += term
    return total % primitives.PRIME


def test_shares_are_values_of_one_polynomial() -> None:
    shares = primitives.split(b"\x07" * 32, 4, [1, 3, 8, 20, 1024])
    values = {place: primitives.share_value(share) for place, share in shares.items()}
    some = {place: values[place] for place in (1, 3, 8, 20)}
    assert interpolated(some, 1024) == values[1024]
    assert interpolated(some, 0) == int.from_bytes(b"\x07" * 32, "big")


def test_shares_that_are_none_are_refused() -> None:
    with pytest.raises(SecureError):
        primitives.share_value(bytes(32))
    with pytest.raises(SecureError):
        primitives.share_value(primitives.PRIME.to_bytes(33, "big"))
    with pytest.raises(ValueError, match="cannot be made"):
        primitives.split(bytes(32), 4, [1, 2, 3])


def test_masks_of_two_cancel_and_are_not_small() -> None:
    one, other, roster = primitives.new_pair(), primitives.new_pair(), hashlib.sha256(b"roster").digest()
    given = primitives.pair_mask(one, primitives.public_of(other), roster, 1000)
    taken = primitives.pair_mask(other, primitives.public_of(one), roster, 1000)
    assert not (given + taken).any()
    assert np.unique(given).size == 1000
    assert not primitives.looks_unmasked(given)
    another = primitives.pair_mask(one, primitives.public_of(other), hashlib.sha256(b"another").digest(), 1000)
    assert (given != another).all()


def test_no_statistical_generator_makes_secrets() -> None:
    """A generator for statistics can be predicted from what it gave, and a mask with it."""
    modules = list(Path(package.__file__).parent.glob("*.py"))
    assert {"member.py", "messages.py", "opening.py", "primitives.py"} <= {module.name for module in modules}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {"random"} & {alias.name for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("random", "numpy.random"), path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("random", "default_rng", "manual_seed", "Generator", "randn", "rand"), path

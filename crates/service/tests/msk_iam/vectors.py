"""Writes vectors.json: tokens of AWS's own signer for Python, for fixed credentials, regions and times.

    python3 -m venv venv
    venv/bin/pip install aws-msk-iam-sasl-signer-python==1.0.2 botocore==1.44.5
    venv/bin/python vectors.py > vectors.json

The test of crates/service/src/login/msk_iam.rs compares our tokens with them.
"""

import datetime
import json
from unittest import mock

from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
from botocore.credentials import CredentialProvider, Credentials

# The example keys of AWS's documentation.
KEYS = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
CASES = [
    ("us-east-1", *KEYS, None, "2024-02-29T23:59:59"),
    ("eu-central-1", *KEYS, "IQoJb3JpZ2luX2VjEXAMPLE//////////wEaDGV1LWNlbnRyYWwtMSJ+/=&?% token==", "2026-11-23T06:30:00"),
    ("us-gov-west-1", "ASIAQNZGKIQY56JQ7WML", "a+b/c=d", "FwoGZXIvYXdzEXAMPLE", "2030-01-01T00:00:00"),
]


class Fixed(CredentialProvider):
    def __init__(self, access_key, secret_key, session_token):
        self.credentials = Credentials(access_key, secret_key, session_token)

    def load(self):
        return self.credentials


def vector(region, access_key, secret_key, session_token, time):
    at = datetime.datetime.fromisoformat(time)
    with mock.patch("botocore.auth.get_current_datetime", return_value=at):
        token, expires = MSKAuthTokenProvider.generate_auth_token_from_credentials_provider(
            region, Fixed(access_key, secret_key, session_token)
        )
    return {
        "region": region,
        "access_key_id": access_key,
        "secret_access_key": secret_key,
        "session_token": session_token,
        "signed_at": int(at.replace(tzinfo=datetime.timezone.utc).timestamp()),
        "token": token,
        "expires_at_ms": expires,
    }


print(json.dumps([vector(*case) for case in CASES], indent=2))

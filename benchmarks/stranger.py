"""A client that asks a server for 128 samples again and again: `python -m benchmarks.stranger URL`, until killed.

Imports the standard library only, and is nice, so that it takes little of the processor's time for itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
from urllib.parse import urlsplit


def main() -> None:
    """Send the next request as soon as the answer to the last one has come."""
    os.nice(19)
    address = urlsplit(sys.argv[1]).netloc
    body = json.dumps({"prompt": [5, 6, 7, 8], "n": 128, "stop_token_ids": []})
    connection = http.client.HTTPConnection(address)
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            continue
        connection.close()


if __name__ == "__main__":
    main()

"""Certificates for 127.0.0.1, signed by themselves."""

import ssl
import subprocess
from pathlib import Path


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Certificate and key, as files of this name."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


def shown(port: int) -> str:
    """The certificate that a port shows now, as PEM."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=30)

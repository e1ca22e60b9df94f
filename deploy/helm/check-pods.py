#!/usr/bin/env python3
"""Runs every container of rendered manifests with the real binaries and --check, which validates flags, environment and files.

    helm template test redeliver --values VALUES | check-pods.py BINARIES [LAKE]

BINARIES is the folder with redeliver, retry-tier, enricher, scheduler, dlq-inspector and console, LAKE the program redeliver-lake, which is
compiled apart from the others: without it, its container is not run. Needs pyyaml (pip install pyyaml).
Secrets get placeholders: files contain VALUES, a certificate if their name ends in .crt or .key, or `placeholder`.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import yaml

# By the name of the file: of the Secret of a KafkaAccess, and of one with tokens.
VALUES = {
    "securityProtocol": "SASL_SSL",
    "saslMechanism": "SCRAM-SHA-512",
    "tokens.yaml": f'tokens: [{{ name: test, sha256: {"0f" * 32}, scopes: ["jobs:read"] }}]',
    "cookie-keys": "placeholder" * 4,
}


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    binaries = pathlib.Path(sys.argv[1])
    lake = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else None
    objects = [document for document in yaml.safe_load_all(sys.stdin) if document]
    configs = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "ConfigMap" and "data" in o}
    checked = []
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        certificate = root / "certificate"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
            + ["-keyout", f"{certificate}.key", "-out", f"{certificate}.crt"],
            check=True,
            capture_output=True,
        )
        for workload in objects:
            if workload["kind"] not in ("StatefulSet", "Deployment", "Job"):
                continue
            name = workload["metadata"]["name"]
            spec = workload["spec"]["template"]["spec"]
            for container in spec["containers"]:
                files = root / name / container["name"]
                write_volumes(files, spec["volumes"], container["volumeMounts"], configs, certificate)
                binary = re.sub(r"^(.*/)?(redeliver-)?([a-z-]+)[:@].*", r"\3", container["image"])
                program = lake if binary == "lake" else binaries / binary
                # Its section is checked with all others.
                if program is None:
                    continue
                problem = check(program, name, container, files)
                checked.append(binary)
                if problem:
                    failures.append(f"{name}, container {container['name']}: {problem}")
    for failure in failures:
        print(failure)
    with_lake = " with the lake" if "lake" in checked else ""
    print(f"{len(checked)} containers{with_lake}, {len(failures)} failed")
    sys.exit(bool(failures))


def write_volumes(files, volumes, mounts, configs, certificate):
    """Writes what the container would see below `files`."""
    volumes = {volume["name"]: volume for volume in volumes}
    for mount in mounts:
        volume = volumes.get(mount["name"], {})
        folder = files / mount["mountPath"].lstrip("/")
        folder.mkdir(parents=True)
        if "configMap" in volume:
            for key, text in configs[volume["configMap"]["name"]].items():
                (folder / key).write_text(in_folder(text, files))
        for item in volume.get("secret", {}).get("items", []):
            path = pathlib.Path(item["path"])
            is_pem = path.suffix in (".crt", ".key")
            text = pathlib.Path(f"{certificate}{path.suffix}").read_text() if is_pem else VALUES.get(path.name, "placeholder")
            (folder / path).write_text(text)


def in_folder(text, files):
    return re.sub(r"(/run/secrets|/etc/redeliver|/var/lib/redeliver)", rf"{files}\1", text)


def check(binary, name, container, files):
    environment = {"PATH": "/usr/bin:/bin"}
    for variable in container["env"]:
        source = variable.get("valueFrom")
        if source is None:
            value = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], variable["value"])
            environment[variable["name"]] = in_folder(value, files)
        elif "fieldRef" in source:
            environment[variable["name"]] = f"{name}-0"
        else:
            is_url = variable["name"].endswith("URL")
            environment[variable["name"]] = "redis://placeholder:6379" if is_url else "placeholder:1"
    result = subprocess.run(
        [binary, *container.get("args", []), "--check"],
        env=environment,
        capture_output=True,
        text=True,
    )
    return result.stderr.strip() if result.returncode else None


main()

#!/usr/bin/env python3
"""Writes JSON schemas for kubeconform, so that test.sh needs no network.

    schemas.py OUT [CRD...]

Built-in kinds come from the package kubernetes-validate (pip install kubernetes-validate), custom kinds from files and folders
with CustomResourceDefinitions (pip install pyyaml). The CRDs of KEDA, the Prometheus operator and cert-manager are in their Go
modules (go mod download -json MODULE@VERSION): `config/crd/bases`, `example/prometheus-operator-crd` and `deploy/crds`.
Those of Strimzi are in its releases.
"""

import json
import pathlib
import sys

import yaml

KUBERNETES = "1.34"

# `=` is a text in CRDs of the Prometheus operator, and a special value in YAML 1.1.
yaml.SafeLoader.add_constructor("tag:yaml.org,2002:value", lambda _, node: node.value)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    kinds = write_builtin(out)
    for path in map(pathlib.Path, sys.argv[2:]):
        for file in sorted(path.rglob("*.y*ml")) if path.is_dir() else [path]:
            for document in yaml.safe_load_all(file.read_text()):
                if document and document.get("kind") == "CustomResourceDefinition":
                    kinds += write_custom(out, document)
    print(f"{kinds} kinds in {out}")


def write(out, kind, group, version, schema):
    """Writes the schema where kubeconform looks for {{.ResourceKind}}{{.KindSuffix}}.json."""
    group = group.split(".")[0]
    suffix = "-".join(filter(None, [group, version]))
    (out / f"{kind.lower()}-{suffix}.json").write_text(json.dumps(schema))


def write_builtin(out):
    import kubernetes_validate

    folder = pathlib.Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    found = sorted(folder.rglob(f"v{KUBERNETES}*/_definitions.json"))
    if not found:
        sys.exit(f"no schemas for Kubernetes {KUBERNETES} below {folder}")
    definitions = json.loads(found[0].read_text())["$defs"]
    kinds = 0
    for name, definition in definitions.items():
        for gvk in definition.get("x-kubernetes-group-version-kind", []):
            write(out, gvk["kind"], gvk["group"], gvk["version"], expand(definition, definitions))
            kinds += 1
    return kinds


def expand(node, definitions, seen=()):
    """The schema without references, and strict: unknown keys are errors."""
    if isinstance(node, list):
        return [expand(item, definitions, seen) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        name = node["$ref"].rsplit("/", 1)[1]
        if name in seen:
            # Only the schemas of CRDs contain themselves.
            return {}
        return expand(definitions[name], definitions, (*seen, name))
    node = {key: expand(value, definitions, seen) for key, value in node.items() if not key.startswith("x-kubernetes")}
    return strict(node)


def strict(node):
    if isinstance(node.get("properties"), dict) and "additionalProperties" not in node:
        node["additionalProperties"] = False
    return node


def write_custom(out, definition):
    spec = definition["spec"]
    for version in spec["versions"]:
        schema = custom(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        write(out, spec["names"]["kind"], spec["group"], version["name"], schema)
    return len(spec["versions"])


def custom(node):
    if isinstance(node, list):
        return [custom(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    keeps = node.get("x-kubernetes-preserve-unknown-fields")
    node = {key: custom(value) for key, value in node.items() if not key.startswith("x-kubernetes")}
    if node.pop("nullable", False) and isinstance(node.get("type"), str):
        node["type"] = [node["type"], "null"]
    return node if keeps else strict(node)


main()

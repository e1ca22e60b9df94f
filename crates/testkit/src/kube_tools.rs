//! The programs with which the Helm chart, the gRPC API and the workflows are tested, in pinned versions, built once per machine; see `kept`. The Go toolchain that
//! builds them comes from PyPI, so that tests do not depend on the one of the machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::hash::stable_hash;
use crate::kept::kept;
use crate::languages::{python, run};

/// A program and the package that is installed for it.
struct GoProgram {
    name: &'static str,
    package: &'static str,
    version: &'static str,
}

/// The linker adds no debug information, which no test needs.
const STRIPPED: &str = "-s -w";

/// Compiled in, so that the code determines what `kube` is.
const KUBE: [(&str, &str); 3] = [
    ("go.mod", include_str!("../../../deploy/kube/go.mod")),
    ("go.sum", include_str!("../../../deploy/kube/go.sum")),
    ("main.go", include_str!("../../../deploy/kube/main.go")),
];

/// Kubernetes reads its own version from here, and refuses to start without one.
const KUBERNETES: &str = "v1.34.1";

/// Go modules with custom resource definitions, and the folder in each.
const CUSTOM_RESOURCES: [(&str, &str); 3] = [
    ("github.com/cert-manager/cert-manager@v1.19.1", "deploy/crds"),
    ("github.com/kedacore/keda/v2@v2.17.2", "config/crd/bases"),
    (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd",
    ),
];

/// Our own definition; see the file.
const STRIMZI: &str = include_str!("../../../deploy/helm/crds/strimzi.yaml");

/// Writes the schemas.
const SCHEMAS: &str = include_str!("../../../deploy/helm/schemas.py");

/// Helm 3. Takes a minute and a half to build.
///
/// # Errors
/// If it cannot be built.
pub fn helm() -> Result<PathBuf> {
    installed(&GoProgram {
        name: "helm",
        package: "helm.sh/helm/v3/cmd/helm",
        version: "v3.19.0",
    })
}

/// Validates Kubernetes objects against schemas.
///
/// # Errors
/// If it cannot be built.
pub fn kubeconform() -> Result<PathBuf> {
    installed(&GoProgram {
        name: "kubeconform",
        package: "github.com/yannh/kubeconform/cmd/kubeconform",
        version: "v0.7.0",
    })
}

/// Checks workflows of GitHub Actions.
///
/// # Errors
/// If it cannot be built.
pub fn actionlint() -> Result<PathBuf> {
    installed(&GoProgram {
        name: "actionlint",
        package: "github.com/rhysd/actionlint/cmd/actionlint",
        version: "v1.7.7",
    })
}

/// Simulates the nodes of a cluster. Takes about a minute to build.
///
/// # Errors
/// If it cannot be built.
pub fn kwok() -> Result<PathBuf> {
    installed(&GoProgram {
        name: "kwok",
        package: "sigs.k8s.io/kwok/cmd/kwok",
        version: "v0.7.0",
    })
}

/// Serves metrics of Prometheus as external metrics, by which a `HorizontalPodAutoscaler` scales. Takes a few minutes to build.
///
/// # Errors
/// If it cannot be built.
pub fn prometheus_adapter() -> Result<PathBuf> {
    installed(&GoProgram {
        name: "adapter",
        package: "sigs.k8s.io/prometheus-adapter/cmd/adapter",
        version: "v0.12.0",
    })
}

/// The control plane of Kubernetes, `deploy/kube`. Takes five minutes to build.
///
/// # Errors
/// If it cannot be built.
pub fn kube() -> Result<PathBuf> {
    let pinned: String = KUBE.iter().map(|(_, text)| *text).collect();
    let name = format!("kube-{KUBERNETES}-{:016x}", stable_hash(pinned.as_bytes()));
    let place = kept(&name, "Kubernetes", |place| {
        for (file, text) in KUBE {
            write(&place.join(file), text)?;
        }
        let flags = format!("{STRIPPED} -X k8s.io/component-base/version.gitVersion={KUBERNETES}");
        run(go()?
            .args(["build", "-ldflags", &flags, "-o", "kube", "."])
            .current_dir(place))?;
        Ok(())
    })?;
    Ok(place.join("kube"))
}

/// A folder with the custom resource definitions that the chart uses: of KEDA, the Prometheus operator, cert-manager and Strimzi.
///
/// # Errors
/// If a module cannot be downloaded.
pub fn custom_resources() -> Result<PathBuf> {
    let pinned = format!("{CUSTOM_RESOURCES:?}{STRIMZI}");
    let name = format!("crds-{:016x}", stable_hash(pinned.as_bytes()));
    kept(&name, "custom resource definitions", |place| {
        for (module, folder) in CUSTOM_RESOURCES {
            let downloaded = run(go()?
                .args(["mod", "download", "-json", module])
                .current_dir(place))?;
            let downloaded: serde_json::Value =
                serde_json::from_str(&downloaded).context("reading what go mod download printed")?;
            let root = downloaded["Dir"]
                .as_str()
                .with_context(|| format!("downloading {module}: {downloaded}"))?;
            copy_definitions(&Path::new(root).join(folder), place)?;
        }
        write(&place.join("strimzi.yaml"), STRIMZI)
    })
}

/// A folder with JSON schemas for kubeconform: the kinds of Kubernetes and those of [`custom_resources`].
///
/// # Errors
/// If what they are made from cannot be downloaded.
pub fn schemas() -> Result<PathBuf> {
    let python = kube_python()?;
    let definitions = custom_resources()?;
    let pinned = format!("{SCHEMAS}{}{}", python.display(), definitions.display());
    let name = format!("schemas-{:016x}", stable_hash(pinned.as_bytes()));
    kept(&name, "schemas of Kubernetes", |place| {
        let script = place.join("schemas.py");
        write(&script, SCHEMAS)?;
        run(Command::new(&python).arg(&script).arg(place).arg(&definitions))?;
        Ok(())
    })
}

/// Python with the packages that the tests of the chart need, and the Go toolchain.
///
/// # Errors
/// If they cannot be installed.
pub fn kube_python() -> Result<PathBuf> {
    python(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/requirements.txt"))
}

/// A gRPC client for the command line. Takes a minute to build.
///
/// # Errors
/// If it cannot be built.
pub fn grpcurl() -> Result<PathBuf> {
    installed(&GoProgram {
        name: "grpcurl",
        package: "github.com/fullstorydev/grpcurl/cmd/grpcurl",
        version: "v1.9.3",
    })
}

fn installed(program: &GoProgram) -> Result<PathBuf> {
    let GoProgram {
        name,
        package,
        version,
    } = program;
    let place = kept(&format!("{name}-{version}"), name, |place| {
        run(go()?
            .args(["install", "-ldflags", STRIPPED])
            .arg(format!("{package}@{version}"))
            .env("GOBIN", place)
            .current_dir(place))?;
        Ok(())
    })?;
    Ok(place.join(name))
}

/// The pinned Go toolchain, without the settings of the user.
///
/// # Errors
/// If it cannot be installed.
pub fn go() -> Result<Command> {
    // Not the script `go` of the environment: it contains the path at which the environment was created.
    let place = run(Command::new(kube_python()?).args(["-c", "import go; print(*go.__path__)"]))?;
    let mut go = Command::new(Path::new(place.trim()).join("bin/go"));
    go.env("CGO_ENABLED", "0");
    go.env("GOFLAGS", "-trimpath -buildvcs=false");
    go.env("GOTOOLCHAIN", "local");
    go.env("GOWORK", "off");
    go.env_remove("GOROOT");
    Ok(go)
}

fn copy_definitions(from: &Path, to: &Path) -> Result<()> {
    let entries = std::fs::read_dir(from).with_context(|| format!("listing {}", from.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("listing {}", from.display()))?
            .path();
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        // There are also lists of files, for kustomize.
        if let Some(name) = path.file_name()
            && text.contains("\nkind: CustomResourceDefinition\n")
        {
            write(&to.join(name), &text)?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

//! Programs that local servers and the tests need, installed as Debian packages if possible.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

/// A program, arguments that make it exit at once, and its package.
type Program = (&'static str, &'static [&'static str], &'static str);

pub(crate) const SERVERS: &[Program] = &[
    ("java", &["-version"], "openjdk-17-jre-headless"),
    ("mvn", &["-version"], "maven"),
    ("redis-server", &["--version"], "redis-server"),
];

const VENV: Program = ("python3", &["-c", "import ensurepip, venv"], "python3-venv");

pub(crate) const PYTHON: &[Program] = &[VENV];

/// For the tests of clients in other languages.
pub(crate) const LANGUAGES: &[Program] = &[
    VENV,
    ("javac", &["-version"], "openjdk-17-jdk-headless"),
    ("node", &["--version"], "nodejs"),
    ("npm", &["--version"], "npm"),
];

/// For the tests of the Helm chart and of the alerts.
pub(crate) const DEPLOYMENT: &[Program] = &[
    VENV,
    ("openssl", &["version"], "openssl"),
    ("promtool", &["--version"], "prometheus"),
    ("amtool", &["--version"], "prometheus-alertmanager"),
];

/// Installs missing packages.
pub(crate) fn ensure_installed(needed: &[Program]) -> Result<()> {
    let missing: BTreeSet<&str> = needed
        .iter()
        .filter(|(program, arguments, _)| !runs(program, arguments))
        .map(|(_, _, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages = Vec::from_iter(missing).join(" ");
    if !runs("apt-get", &["--version"]) || !rustix::process::geteuid().is_root() {
        bail!("missing programs; install these Debian packages or their equivalents: {packages}");
    }
    eprintln!("installing {packages}");
    apt_get(&["update", "--quiet"])?;
    apt_get(&[
        "install",
        "--quiet",
        "--yes",
        "--no-install-recommends",
        &packages,
    ])
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let quiet = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    quiet.is_ok_and(|status| status.success())
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let words = arguments.iter().flat_map(|argument| argument.split(' '));
    let output = Command::new("apt-get")
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        // Pretends single-user mode, so that installing Redis does not start a server on its default port
        // (invoke-rc.d(8)).
        .env("RUNLEVEL", "1")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running apt-get {}", arguments.join(" ")))?;
    ensure!(
        output.status.success(),
        "running apt-get {}: {}\n{}{}",
        arguments.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

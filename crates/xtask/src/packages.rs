//! The programs that a native Kafka and Redis and the tests need, installed as Debian packages where that is
//! possible.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

/// A program, arguments with which it ends at once, and the package that has it.
type Program = (&'static str, &'static [&'static str], &'static str);

/// What Kafka and Redis need.
pub(crate) const SERVERS: &[Program] = &[
    ("java", &["-version"], "openjdk-17-jre-headless"),
    ("mvn", &["-version"], "maven"),
    ("redis-server", &["--version"], "redis-server"),
];

const VENV: Program = ("python3", &["-c", "import ensurepip, venv"], "python3-venv");

/// What programs in Python need.
pub(crate) const PYTHON: &[Program] = &[VENV];

/// What the programs in other languages need, which tests run.
pub(crate) const LANGUAGES: &[Program] = &[
    VENV,
    ("node", &["--version"], "nodejs"),
    ("npm", &["--version"], "npm"),
];

/// Installs what is missing.
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
        bail!("please install these Debian packages or their like: {packages}");
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
        // Tells the package's scripts that the machine is in single-user mode: Redis is installed, but
        // no Redis is started on the usual port behind the user's back (invoke-rc.d(8)).
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

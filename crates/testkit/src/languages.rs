//! Programs in other languages: their pinned packages and compiled classes, which are made once per machine; see `kept`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::hash::stable_hash;
use crate::jars;
use crate::kept::kept;

/// The Python of a virtual environment with the packages of a `requirements.txt`.
///
/// # Errors
/// If there is no Python 3 with `venv`, or the packages cannot be installed.
pub fn python(requirements: &Path) -> Result<PathBuf> {
    let pinned = read(requirements)?;
    // A virtual environment works only with the Python that created it.
    let version = run(Command::new("python3").arg("--version"))?;
    let name = format!(
        "python-{:016x}",
        stable_hash(format!("{version}{pinned}").as_bytes())
    );
    let environment = kept(&name, "packages of Python", |place| {
        run(Command::new("python3").args(["-m", "venv"]).arg(place))?;
        run(Command::new(place.join("bin/python"))
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--requirement",
            ])
            .arg(requirements))?;
        Ok(())
    })?;
    Ok(environment.join("bin/python"))
}

/// The `node_modules` of a `package.json` with its `package-lock.json`: the value for `NODE_PATH`.
///
/// # Errors
/// If there is no npm, or the packages cannot be installed.
pub fn node_modules(package: &Path) -> Result<PathBuf> {
    let files = ["package.json", "package-lock.json"];
    let mut pinned = String::new();
    for file in files {
        pinned += &read(&package.join(file))?;
    }
    let name = format!("node-{:016x}", stable_hash(pinned.as_bytes()));
    let installed = kept(&name, "packages of Node.js", |place| {
        for file in files {
            let (from, to) = (package.join(file), place.join(file));
            std::fs::copy(&from, &to).with_context(|| format!("copying {}", from.display()))?;
        }
        run(Command::new("npm")
            .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
            .current_dir(place))?;
        Ok(())
    })?;
    Ok(installed.join("node_modules"))
}

/// Where a Java program gets its libraries from.
#[derive(Clone, Copy, Debug)]
pub enum Libraries<'p> {
    /// Those of Kafka, of the version that the tests use.
    Kafka,
    /// Those of Kafka, of another version.
    KafkaOf(&'p str),
    /// Those that a `pom.xml` lists.
    Pom(&'p Path),
}

/// A command that runs a Java program in one file, whose class has the name of the file, with Kafka's libraries.
///
/// # Errors
/// As [`java_with`].
pub fn java(program: &Path) -> Result<Command> {
    java_with(program, Libraries::Kafka)
}

/// A command that runs a Java program in one file, whose class has the name of the file. The directory of the file is on the class path,
/// for its `META-INF`.
///
/// # Errors
/// If there is no JDK, the program does not compile, or the libraries cannot be fetched.
pub fn java_with(program: &Path, libraries: Libraries<'_>) -> Result<Command> {
    let source = read(program)?;
    let jars = match libraries {
        Libraries::Kafka => jars::resolved(),
        Libraries::KafkaOf(version) => jars::of_version(version),
        Libraries::Pom(pom) => jars::listed_in(pom),
    };
    let jars = jars?.join("*");
    let version = run(Command::new("javac").arg("--version"))?;
    let name = format!(
        "java-{:016x}",
        stable_hash(format!("{version}{}{source}", jars.display()).as_bytes())
    );
    let classes = kept(&name, "classes of Java", |place| {
        run(Command::new("javac")
            // Processors are in some jars.
            .args(["-Werror", "-Xlint:all,-path", "-proc:none", "-d"])
            .arg(place)
            .arg("-cp")
            .arg(&jars)
            .arg(program))?;
        Ok(())
    })?;
    let class = program.file_stem().context("the program has no file name")?;
    let directory = program.parent().context("the program has no directory")?;
    let mut path = classes.into_os_string();
    for next in [directory, jars.as_path()] {
        path.push(":");
        path.push(next);
    }
    let mut command = Command::new("java");
    // Starts faster, as for Kafka's own tools.
    command
        .args(["-XX:TieredStopAtLevel=1", "-cp"])
        .arg(path)
        .arg(class);
    Ok(command)
}

/// Runs a command to its end and returns its output.
///
/// # Errors
/// If it cannot be started or fails; the error contains its output.
pub fn run(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command
        .output()
        .with_context(|| format!("starting {shown}; is it installed?"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "running {shown}: {}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(stdout)
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

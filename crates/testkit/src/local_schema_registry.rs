//! A schema registry that belongs to one test: Apicurio Registry in memory, with its API that is compatible with Confluent's schema registry.
//!
//! Needs Java 17 or newer, and Maven, which downloads the registry on the first run on a machine (140 MB) into the user's cache directory.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::kept::kept;
use crate::process::Process;
use crate::scratch::Scratch;
use crate::{free_port, http};

/// The last version with a Java 11 or 17 that Maven Central has with all that it refers to.
const VERSION: &str = "2.6.13.Final";
/// The path of the compatible API.
const API: &str = "/apis/ccompat/v7";
/// It normally takes 6 s, but may have to start while the machine is compiling.
const START_DEADLINE: Duration = Duration::from_secs(120);

/// One registry; see the module.
#[derive(Debug)]
pub struct LocalSchemaRegistry {
    port: u16,
    // Before `scratch`, so that it is dead when its directory is removed.
    process: Option<Process>,
    scratch: Scratch,
}

impl LocalSchemaRegistry {
    /// Starts a new, empty registry.
    ///
    /// # Errors
    /// If it cannot be fetched or started; the error contains the end of its log.
    pub fn start() -> Result<Self> {
        let mut registry = Self {
            port: free_port(),
            process: None,
            scratch: Scratch::new("schemas")?,
        };
        registry.start_again()?;
        Ok(registry)
    }

    /// The URL of the compatible API, which does not change over restarts.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}{API}", self.address())
    }

    /// Starts it again, empty, on the same port.
    ///
    /// # Errors
    /// If it is running, or does not come up; the error contains the end of its log.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(
            self.process.is_none(),
            "starting the schema registry: it is running already"
        );
        let jar = format!("apicurio-registry-app-{VERSION}-runner.jar");
        let mut command = Command::new("java");
        command
            .args(["-Xmx256m", "-Dquarkus.http.host=127.0.0.1"])
            .arg(format!("-Dquarkus.http.port={}", self.port))
            .arg("-jar")
            .arg(resolved()?.join(jar))
            .current_dir(self.scratch.path());
        let log = self.scratch.path().join("registry.log");
        let mut process =
            Process::spawn_logging_to(command, log).context("running `java`; is it installed?")?;
        self.scratch.set_user(process.id())?;
        let address = self.address();
        process.wait_until_ready("the schema registry", START_DEADLINE, || {
            match http::get(address, &format!("{API}/subjects"))? {
                (200, _) => Ok(()),
                (status, body) => bail!("it answers {status}: {body}"),
            }
        })?;
        self.process = Some(process);
        Ok(())
    }

    /// Kills it. The port is kept, the schemas are not.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn kill_9(&mut self) {
        let mut process = self
            .process
            .take()
            .expect("the schema registry is stopped already");
        process.kill_9();
    }

    /// Registers a schema, and returns its id. `references` are names of other schemas: each is also its subject, of version 1.
    ///
    /// # Panics
    /// If the registry refuses it.
    pub async fn register(&self, subject: &str, format: &str, schema: &str, references: &[&str]) -> u32 {
        let references = references.iter();
        let references: Vec<Value> = references
            .map(|name| json!({ "name": name, "subject": name, "version": 1 }))
            .collect();
        let body = json!({ "schemaType": format, "schema": schema, "references": references });
        let request = http::client()
            .post(format!("{}/subjects/{subject}/versions", self.url()))
            .header("content-type", "application/vnd.schemaregistry.v1+json")
            .body(body.to_string());
        let response = request.send().await.expect("an answer of the schema registry");
        let text = response.text().await.expect("the body of the answer");
        let answer: Value = serde_json::from_str(&text).expect("an answer in JSON");
        let id = answer["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        id.unwrap_or_else(|| panic!("the schema registry refuses {subject}: {text}"))
    }

    fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }
}

/// The directory with the program, which the first call on a machine fills.
fn resolved() -> Result<PathBuf> {
    kept(&format!("schema-registry-{VERSION}"), "a schema registry", fetch)
}

fn fetch(directory: &Path) -> Result<()> {
    let output = Command::new("mvn")
        .args([
            "--batch-mode",
            "--quiet",
            "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:unpack",
        ])
        .arg(format!(
            "-Dartifact=io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
        ))
        .arg(format!("-DoutputDirectory={}", directory.display()))
        // There is no project.
        .current_dir(directory)
        .output()
        .context("starting Maven (`mvn`), which fetches the schema registry; is it installed?")?;
    ensure!(
        output.status.success(),
        "fetching the schema registry with Maven: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

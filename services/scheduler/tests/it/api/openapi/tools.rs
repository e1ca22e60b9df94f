//! Programs of others that know the API only from its document: Schemathesis, and a client that openapi-python-client generates.

use std::path::{Path, PathBuf};
use std::process::Command;

use redeliver_testkit::languages::{python, run};
use redeliver_testkit::scratch::Scratch;
use tokio::task::block_in_place;

use crate::api::server::Server;

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/api/openapi")
}

/// Python with the packages that these tests need.
fn python_with_tools() -> Command {
    Command::new(python(&files().join("requirements.txt")).unwrap())
}

/// Sends valid and invalid requests to each operation, alone and one after the other. Fails if a response is a 5xx, is not in the
/// document, or accepts what the document forbids.
fn try_all(server: &Server) {
    let scratch = Scratch::new("schemathesis").unwrap();
    let mut schemathesis = python_with_tools();
    schemathesis
        .current_dir(scratch.path())
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(files().join("schemathesis.toml"))
        .args(["run", "--no-color", "--max-examples", "200"])
        .arg(format!("http://{}/v1/openapi.json", server.address()));
    println!("{}", run(&mut schemathesis).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn random_requests_get_documented_responses() {
    let server = Server::start();
    block_in_place(|| try_all(&server));
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_client_works() {
    let server = Server::start();
    let document = server.get("/v1/openapi.json").await.is(200).text;
    let scratch = Scratch::new("generated-client").unwrap();
    std::fs::write(scratch.path().join("openapi.json"), document).unwrap();
    block_in_place(|| {
        let mut generator = python_with_tools();
        generator
            .current_dir(scratch.path())
            .args([
                "-m",
                "openapi_python_client",
                "generate",
                "--path",
                "openapi.json",
            ])
            .args(["--meta", "none", "--output-path", "generated"]);
        run(&mut generator).unwrap();
        let mut client = python_with_tools();
        client
            .env("PYTHONPATH", scratch.path())
            .arg(files().join("generated_client.py"))
            .arg(format!("http://{}", server.address()));
        run(&mut client).unwrap();
    });
}

//! Generates messages and services from `proto/` with protox, so that no protoc is needed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo::rerun-if-changed={}", root.display());
    let files = [
        "common",
        "jobs",
        "job_state",
        "schedules",
        "dead_letters",
        "control",
        "audit",
        "redrive",
        "waiting",
    ]
    .map(|name| format!("redeliver/v1/{name}.proto"));
    let descriptors = protox::compile(files, [root])?;
    let out = PathBuf::from(env("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}

fn env(name: &str) -> Result<String, Box<dyn Error>> {
    std::env::var(name).map_err(|error| format!("{name}: {error}").into())
}

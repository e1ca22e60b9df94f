//! The generated code is that of the schemas in `proto/`.

use std::path::{Path, PathBuf};

use prost::Message as _;

/// Generates messages, services and descriptors into a directory. protox compiles the schemas, so no protoc is needed.
fn generate(into: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    let schemas = std::fs::read_dir(root.join("redeliver/v1")).unwrap();
    let mut schemas: Vec<PathBuf> = schemas.map(|entry| entry.unwrap().path()).collect();
    schemas.sort();
    let mut descriptors = protox::compile(&schemas, [root]).unwrap();
    tonic_prost_build::configure()
        .bytes(".")
        .out_dir(into)
        .compile_fds(descriptors.clone())
        .unwrap();
    // Servers do not need the comments.
    for file in &mut descriptors.file {
        file.source_code_info = None;
    }
    std::fs::write(into.join("descriptors.bin"), descriptors.encode_to_vec()).unwrap();
}

#[test]
fn generated_code_is_current() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/generated");
    if std::env::var_os("REDELIVER_UPDATE").is_some() {
        generate(&directory);
    }
    let current = tempfile::tempdir().unwrap();
    generate(current.path());
    for name in ["descriptors.bin", "redeliver.v1.rs"] {
        let same =
            std::fs::read(directory.join(name)).unwrap() == std::fs::read(current.path().join(name)).unwrap();
        assert!(
            same,
            "{name} is not what proto/ says; run REDELIVER_UPDATE=1 cargo test --package redeliver-proto --test it"
        );
    }
}

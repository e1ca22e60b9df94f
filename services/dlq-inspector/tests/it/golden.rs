//! Error messages of the binary.

use redeliver_testkit::binary;

/// The exit code and the error output of a process with these settings.
fn run_with(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = binary("dlq-inspector");
    command.env_clear();
    for argument in arguments {
        command.arg("--set").arg(argument);
    }
    let output = command.output().unwrap();
    assert!(output.stdout.is_empty());
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn invalid_configuration_is_refused_with_field() {
    for (argument, expected) in [
        (
            "dlq_inspector.listen=0.0.0.0:50051",
            "error: dlq_inspector.listen: 0.0.0.0:50051 is reachable from other machines without \
             authentication: listen on 127.0.0.1, set token_file, auth or tls.client_ca_file, or set allow_remote: \
             true (--set dlq_inspector.listen)\n",
        ),
        (
            "dlq_inspector.token_file=/nowhere/token",
            "error: dlq_inspector.token_file: cannot read /nowhere/token: No such file or directory (os error 2) (--set \
             dlq_inspector.token_file)\n",
        ),
        (
            "dlq_inspector.topics=[\"a b\"]",
            "error: dlq_inspector.topics: `a b` is not a topic name or a pattern such as *-dlq (--set \
             dlq_inspector.topics)\n",
        ),
        (
            "dlq_inspector.token=x",
            "error: dlq_inspector.token: unknown key; expected one of listen, token_file, allow_remote, tls, auth, \
             topics, share_group_sources, data_dir, json_fields, masking, record_disclosures, schema_registry, redrive, max_job_outcomes, pipeline_audit, webhook (--set dlq_inspector.token)\n",
        ),
    ] {
        assert_eq!(
            run_with(&[argument]),
            (Some(2), expected.to_owned()),
            "{argument}"
        );
    }
}

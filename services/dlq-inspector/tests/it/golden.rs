//! What the binary says to those who got something wrong.

use redeliver_testkit::binary;

use crate::support::Setup;

/// What a refusing process says: its exit code, and its error.
fn refusal(arguments: &[&str]) -> (Option<i32>, String) {
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
fn a_wrong_configuration_is_refused_with_its_field() {
    for (argument, expected) in [
        (
            "dlq_inspector.listen=0.0.0.0:50051",
            "error: dlq_inspector.listen: 0.0.0.0:50051 can be reached from other machines, and nothing asks for a \
             token there: write 127.0.0.1, or give a token_file, or set allow_remote: true beside it (--set \
             dlq_inspector.listen)\n",
        ),
        (
            "dlq_inspector.token_file=/nowhere/token",
            "error: dlq_inspector.token_file: cannot read /nowhere/token: No such file or directory (os error 2) (--set \
             dlq_inspector.token_file)\n",
        ),
        (
            "dlq_inspector.topics=[\"a b\"]",
            "error: dlq_inspector.topics: `a b` cannot be a topic or a pattern of topics such as *-dlq (--set \
             dlq_inspector.topics)\n",
        ),
        (
            "dlq_inspector.token=x",
            "error: dlq_inspector.token: unknown key; known are listen, token_file, allow_remote, topics, data_dir (--set \
             dlq_inspector.token)\n",
        ),
    ] {
        assert_eq!(refusal(&[argument]), (Some(2), expected.to_owned()), "{argument}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_another_process_uses_is_refused() {
    let setup = Setup::new("in-use");
    let _first = setup.serve().await;
    let mut second = setup.start();
    let output = second
        .process
        .wait_for_output("error: ", crate::support::DEADLINE);
    assert_eq!(second.process.wait(crate::support::DEADLINE).code(), Some(1));
    let error = output.lines().find(|line| line.starts_with("error: ")).unwrap();
    let expected = format!(
        "error: the index in {} is in use by another process: give each its own dlq_inspector.data_dir",
        setup.data_dir().display()
    );
    assert_eq!(error, expected);
}

//! A worker that greets the name in each record.

use redeliver_worker::{Attempt, Failure, Worker};

async fn greet(attempt: Attempt) -> Result<String, Failure> {
    match attempt.text()? {
        "" => Err(Failure::permanent("greeter.no-name", "the value is empty")), // becomes a dead letter
        "shy" if !attempt.is_last => Err(Failure::transient("greeter.shy", "not yet")), // is tried again
        name => Ok(format!("hello {name}")),                                    // is the result
    }
}

fn main() -> std::process::ExitCode {
    Worker::new("greeter").handle(greet).main()
}

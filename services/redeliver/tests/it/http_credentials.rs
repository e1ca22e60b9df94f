//! Secret headers of an endpoint are replaced without a restart.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Fate, Reply, ServiceProcess, ensure, eventually};

use crate::support::{DEADLINE, Pipe, PipeBuilder, Sent, records};

/// Replaces a file as Kubernetes does: no reader sees a part of it.
fn write(file: &Path, contents: &str) {
    let next = file.with_extension("next");
    fs::write(&next, contents).unwrap();
    fs::rename(next, file).unwrap();
}

#[track_caller]
fn until_stale(enricher: &mut ServiceProcess, pipe: &Pipe, expected: u64) {
    let setting = format!("pipelines.{}.http.header_files", pipe.pipeline.name);
    let series = format!("redeliver_credentials_stale{{setting=\"{setting}\"}}");
    enricher.until_metric(&series, |stale| stale == expected);
}

#[test]
fn changed_header_file_costs_no_attempt() {
    let scratch = Scratch::new("header").unwrap();
    let file = scratch.path().join("token");
    write(&file, "Bearer secret-0\n");
    let accepted = Arc::new(Mutex::new(vec!["Bearer secret-0".to_owned()]));
    let used = Arc::new(Mutex::new(String::new()));
    let pipe = PipeBuilder::new("rotation")
        .pipeline(
            "http.header_files",
            &format!("{{ authorization: {} }}", file.display()),
        )
        .breaker("{ failures: 3, rate: null, open_max: 1s }")
        .behave({
            let (accepted, used) = (accepted.clone(), used.clone());
            move |request| {
                let sent = request.headers.get("authorization");
                let sent = sent.map_or_else(String::new, |sent| sent.to_str().unwrap().to_owned());
                let reply = match accepted.lock().unwrap().contains(&sent) {
                    true => Reply::ok(request.body.clone()),
                    false => Reply::status(401),
                };
                *used.lock().unwrap() = sent;
                reply
            }
        })
        .create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let mut sent: Vec<Sent> = Vec::new();
    let mut process = |count: usize| {
        sent.extend(pipe.produce(records(count)));
        sent.len()
    };
    // The file changes before the endpoint forgets the previous token, and after that.
    for round in 1..=2 {
        let mut ended = process(100);
        let token = format!("Bearer secret-{round}");
        if round % 2 == 0 {
            accepted.lock().unwrap().push(token.clone());
            write(&file, &format!("{token}\n"));
            eventually("the new token is used", DEADLINE, || {
                ended = process(1);
                let used = used.lock().unwrap().clone();
                ensure(used == token, used)
            });
            // No call with the previous token is on its way any more.
            pipe.watch().until_ended(ended, DEADLINE);
            *accepted.lock().unwrap() = vec![token];
        } else {
            pipe.watch().until_ended(ended, DEADLINE);
            *accepted.lock().unwrap() = vec![token.clone()];
            ended = process(50);
            // While it is closed, a success makes a failure before it that of its record.
            enricher.until_metric("redeliver_worker_breaker_open", |closed| closed == 1);
            write(&file, &format!("{token}\n"));
        }
        pipe.watch().until_ended(ended, DEADLINE);
    }
    // A file that cannot be used leaves the previous contents in use.
    write(&file, "two\nlines\n");
    until_stale(&mut enricher, &pipe, 1);
    let ended = process(50);
    pipe.watch().until_ended(ended, DEADLINE);
    write(&file, "Bearer secret-2\n");
    until_stale(&mut enricher, &pipe, 0);

    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| Fate::Succeeds);
    assert!(enricher.has_never_ended());
    enricher.shut_down();
    let output = enricher.output();
    assert!(output.contains("header_files.authorization"), "{output}");
    assert!(!output.contains("secret-"), "{output}");
}

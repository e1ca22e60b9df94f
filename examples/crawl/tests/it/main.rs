//! The crawl as a process.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::json::{Scalar, scalar_at};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::{
    EnvBuilder, FakeEndpoint, Process, Reply, Request, TestEnv, binary, ensure, eventually,
};

const DEADLINE: Duration = Duration::from_secs(180);
const PAGES: usize = 14;

#[test]
fn demonstration_crawls_politely() {
    let mut command = binary("redeliver-example-crawl");
    command.env_clear().arg("--demo");
    let mut demo = Process::spawn(command).unwrap();
    let status = demo.wait(Duration::from_secs(180));
    let output = demo.output();
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(output.contains("All 28 pages ended once"), "{output}");
}

#[test]
fn invalid_configurations_and_flags_are_rejected() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/crawl.yaml");
    for (arguments, code, message) in [
        (
            "--set pipelines.crawl-jobs.return_to=due",
            2,
            "crawl-jobs.return_to",
        ),
        ("--set scheduler.apps.crawl.topic=elsewhere", 2, "scheduler.apps"),
        ("ftp://127.0.0.1/", 2, "must be an http or https URL"),
        ("http://other.test/", 2, "outside of --within"),
        ("--demo", 2, "cannot be used with"),
        ("--within Example.org https://example.ORG/#top", 0, ""),
    ] {
        let mut command = binary("redeliver-example-crawl");
        command.env_clear().args(["--check", "--config", file]);
        let output = command.args(arguments.split(' ')).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{printed}");
        assert!(printed.contains(message), "{printed}");
    }
}

/// Each page links to the next three. One is not available, and one is gone.
fn site(request: &Request) -> Reply {
    if request.path == "/robots.txt" {
        return Reply::ok("User-agent: *\nCrawl-delay: 0.1");
    }
    match request.path[1..].parse::<usize>() {
        Ok(5) => Reply::status(503),
        Ok(7) => Reply::status(410),
        Ok(page) if page < PAGES => {
            let link = |next| format!("<a href=\"/{next}\">{next}</a>");
            let links: String = (page + 1..PAGES).take(3).map(link).collect();
            let content_type = ("content-type".to_owned(), "text/html".to_owned());
            Reply::Status(200, vec![content_type], links.into())
        }
        _ => Reply::status(404),
    }
}

/// By page, the status of each result and the error code of each dead letter.
fn ends(env: &TestEnv) -> BTreeMap<String, Vec<String>> {
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "crawl-test");
    let topics = ["results", "dlq"].map(|of| format!("{}-{of}", env.name()).into());
    let mut ends = BTreeMap::<String, Vec<String>>::new();
    let mut reader = TopicReader::new(&kafka, &topics).unwrap();
    let read = reader.read_to_end(DEADLINE, |record| {
        let value = record.value.unwrap();
        let field = |pointer: &str| {
            let text = scalar_at(&value, pointer).ok()?.map(Scalar::into_text)?;
            Some(String::from_utf8(text.into_owned()).unwrap())
        };
        let code = record.headers.last(ERROR_CODE).unwrap_or_default();
        let code = field("/status").unwrap_or_else(|| String::from_utf8_lossy(code).into_owned());
        ends.entry(field("/url").unwrap()).or_default().push(code);
    });
    read.unwrap();
    ends
}

#[test]
fn killed_crawlers_crawl_each_page_once() {
    let pipeline = include_str!("../../crawl.yaml")
        .split_once("pipelines:")
        .unwrap()
        .1;
    let pipeline = pipeline
        .replace("crawl-jobs", "{name}")
        .replace("crawl-results", "{name}-results");
    let env = EnvBuilder::new("crawl")
        .scheduler(&[("crawl", "{name}")])
        .yaml(&format!("pipelines:{pipeline}"))
        .build();
    let applied = env.run("redeliver", &["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    let endpoint = FakeEndpoint::start(site);
    let first = format!("{}/0", endpoint.url());
    let _scheduler = env.start("scheduler", "a", &[]);
    let _tier = env.start("retry-tier", "a", &[]);
    let mut crawlers = ["a", "b"].map(|name| env.start("redeliver-example-crawl", name, &[&first]));
    for (crawler, ended) in crawlers.iter_mut().zip([2, 6]) {
        let until = format!("{ended} pages have ended");
        eventually(&until, DEADLINE, || {
            Some(()).filter(|()| ends(&env).len() >= ended).ok_or("fewer")
        });
        crawler.kill_9();
        crawler.start_again();
    }
    let end = |page| match page {
        5 => "http.503",
        7 => "http.410",
        _ => "200",
    };
    let url = |page| format!("{}/{page}", endpoint.url());
    let expected: BTreeMap<_, _> = (0..PAGES)
        .map(|page| (url(page), vec![end(page).to_owned()]))
        .collect();
    eventually("all pages have ended", DEADLINE, || {
        let ends = ends(&env);
        ensure(ends == expected, format!("{ends:?}"))
    });
    // A page that is crawled twice would be seen once nothing waits any more.
    eventually("nothing waits", DEADLINE, || {
        let audit = env.run("redeliver", &["audit"]);
        ensure(audit.code == Some(0), audit.stdout)
    });
    assert_eq!(ends(&env), expected);
}

//! The console, also that of `redeliver dev`: every page, the command that each page shows, and the forms that change something.

mod browser;
mod house;
mod in_browser;
mod news;
mod oidc;
mod tasks;
mod waiting;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::Command;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::http::{self, Method};
use redeliver_testkit::jwt::{Issuer, jwks};
use redeliver_testkit::oidc_provider::AUDIENCE;
use redeliver_testkit::{FakeEndpoint, Process, Reply, ServiceProcess, binary, eventually, free_port, run};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, records};
use browser::crawl;
use house::House;

/// What stands between two texts, the first time.
#[track_caller]
fn between<'t>(text: &'t str, begin: &str, end: &str) -> &'t str {
    let rest = text
        .split_once(begin)
        .unwrap_or_else(|| panic!("{begin:?} is not in {text}"));
    rest.1
        .split_once(end)
        .unwrap_or_else(|| panic!("{end:?} is not in {text}"))
        .0
}

/// The first link that begins like this, once the page has one.
#[track_caller]
fn link(console: SocketAddr, page: &str, prefix: &str) -> String {
    eventually(page, DEADLINE, || match http::get(console, page) {
        Ok((200, body)) if body.contains(&format!("href=\"{prefix}")) => Ok(format!(
            "{prefix}{}",
            between(&body, &format!("href=\"{prefix}"), "\"")
        )),
        other => Err(format!("{other:?}")),
    })
}

/// The page shows what it should, and its command works.
#[track_caller]
fn check(console: SocketAddr, config: &str, page: &str, shown: &str) {
    eventually(page, DEADLINE, || match http::get(console, page) {
        Ok((200, body)) if body.contains(shown) && !body.contains("class=\"problem\"") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let (_, body) = http::get(console, page).unwrap();
    let command = unescaped(between(&body, "data-copy=\"", "\""));
    let program = binary("redeliver");
    let directory = std::path::Path::new(program.get_program()).parent().unwrap();
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &command])
        .env("PATH", directory)
        .env("REDELIVER_CONFIG", config);
    let run = shell.output().unwrap();
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{page}: {command}: {stderr}");
}

/// The demonstration, the address of its console, and its greeting.
fn demo() -> (Process, SocketAddr, String) {
    let mut command = binary("redeliver");
    command
        .env_clear()
        .args(["dev", "--rate", "20", "--console", "127.0.0.1:0"]);
    let mut demo = Process::spawn(command).unwrap();
    let greeting = demo.wait_for_output("Press Ctrl-C to stop.", DEADLINE);
    assert!(greeting.starts_with("Open http://127.0.0.1:"), "{greeting}");
    let console = between(&greeting, "Open http://", " ").parse().unwrap();
    (demo, console, greeting)
}

fn unescaped(html: &str) -> String {
    html.replace("&#34;", "\"")
        .replace("&#39;", "'")
        .replace("&#60;", "<")
        .replace("&#62;", ">")
        .replace("&#38;", "&")
        .replace("&amp;", "&")
}

/// A form as a browser without scripts has it.
struct Form {
    console: SocketAddr,
    path: String,
    cookie: String,
    fields: Vec<(String, String)>,
}

impl Form {
    #[track_caller]
    fn open(console: SocketAddr, path: &str) -> Self {
        Self::open_as("", console, path)
    }

    /// For the viewer with these cookies.
    #[track_caller]
    fn open_as(session: &str, console: SocketAddr, path: &str) -> Self {
        let headers = [("cookie", session)];
        let page = http::exchange(Method::GET, console, path, &headers, String::new()).unwrap();
        assert_eq!(page.status, 200, "{path}: {}", page.body);
        let cookie = page.headers["set-cookie"].to_str().unwrap();
        for flag in ["HttpOnly", "SameSite=Strict", "Path=/"] {
            assert!(cookie.contains(flag), "{cookie}");
        }
        let form = between(&page.body, "<form class=\"act\"", "</form>");
        let inputs = form.split("<input ").skip(1).filter_map(|input| {
            let tag = input.split_once('>')?.0;
            let is_sent = !tag.contains("checkbox") || tag.contains(" checked");
            let name = between(tag, "name=\"", "\"").to_owned();
            is_sent.then(|| (name, unescaped(between(tag, "value=\"", "\""))))
        });
        let texts = form.split("<textarea ").skip(1).map(|text| {
            let value = between(text, ">\n", "</textarea>");
            (between(text, "name=\"", "\"").to_owned(), unescaped(value))
        });
        Self {
            console,
            path: path.to_owned(),
            cookie: format!("{session}; {}", cookie.split(';').next().unwrap()),
            fields: inputs.chain(texts).collect(),
        }
    }

    /// Name and value.
    #[track_caller]
    fn field(&self, name: &str) -> &(String, String) {
        let field = self.fields.iter().find(|(known, _)| known == name);
        field.unwrap_or_else(|| panic!("no field {name}"))
    }

    #[track_caller]
    fn fill(mut self, name: &str, value: &str) -> Self {
        let field = self.fields.iter_mut().find(|(known, _)| known == name);
        field.unwrap_or_else(|| panic!("no field {name}")).1 = value.to_owned();
        self
    }

    /// Its fields as a browser sends them.
    fn encoded(&self) -> String {
        let encoded = |text: &str| -> String { text.bytes().map(|byte| format!("%{byte:02x}")).collect() };
        let fields = self.fields.iter();
        let fields = fields.map(|(name, value)| format!("{name}={}", encoded(value)));
        fields.collect::<Vec<_>>().join("&")
    }

    /// Asks for its page with all that it would send.
    fn get(&self) -> http::Answer {
        let path = self.path.split('?').next().unwrap();
        let path = format!("{path}?{}", self.encoded());
        let headers = [("cookie", &*self.cookie), ("sec-fetch-site", "same-origin")];
        http::exchange(Method::GET, self.console, &path, &headers, String::new()).unwrap()
    }

    fn send_from(&self, site: &str) -> http::Answer {
        let body = self.encoded();
        let headers = [
            ("cookie", &*self.cookie),
            ("sec-fetch-site", site),
            ("content-type", "application/x-www-form-urlencoded"),
        ];
        http::exchange(Method::POST, self.console, &self.path, &headers, body).unwrap()
    }

    /// Sends it twice, as an impatient person does, and returns the page that follows both times.
    #[track_caller]
    fn send(&self) -> String {
        let mut next = [(); 2].map(|()| {
            let answer = self.send_from("same-origin");
            assert_eq!(answer.status, 303, "{}: {}", self.path, answer.body);
            answer.headers["location"].to_str().unwrap().to_owned()
        });
        assert_eq!(next[0], next[1], "{}", self.path);
        std::mem::take(&mut next[0])
    }

    /// Sends it, and returns the page if it is refused.
    #[track_caller]
    fn refused(&self, status: u16) -> String {
        let answer = self.send_from("same-origin");
        assert_eq!(answer.status, status, "{}: {}", self.path, answer.body);
        answer.body
    }
}

#[test]
fn forms_act_once() {
    let (_demo, console, greeting) = demo();
    let shows = |page: &str, text: &str| {
        eventually(page, DEADLINE, || match http::get(console, page) {
            Ok((200, body)) if body.contains(text) => Ok(body),
            other => Err(format!("{text:?} is not in {other:?}")),
        })
    };
    let button = |page: &str, prefix: &str| unescaped(&link(console, page, prefix));

    // An edit is shown before it is planned, and planned before its dead letter can be redriven.
    let letter = link(
        console,
        "/letters?filter=state%20%3D%20OPEN%20AND%20value_size%20%3E%200",
        "/letters/docs-dlq/",
    );
    let edit = button(&letter, "/act/edit?id=");
    let unchanged = Form::open(console, &edit).refused(400);
    assert!(unchanged.contains("Nothing differs"), "{unchanged}");
    let start = Form::open(console, &edit).fill("value", "{\"number\": 1}").send();
    let shown = shows(&start, "edited: value");
    assert!(shown.contains("Redrive 1 dead letter"), "{shown}");

    // A redrive of a group: plan, look, start.
    let group = link(
        console,
        "/groups?filter=error_code%20%3D%20%22http.422%22",
        "/groups/",
    );
    let plan = Form::open(console, &button(&group, "/act/plan?kind=redrive"))
        .fill("reason", "INC-17 & <b>")
        .fill("observe", "1s");
    assert_eq!(plan.send_from("cross-site").status, 403);
    let start = plan.send();
    assert!(start.starts_with("/act/redrive?id="), "{start}");
    for (header, change) in [
        ("redrive-id", "added"),
        ("error-code", "removed"),
        ("pipeline", "kept"),
    ] {
        shows(&start, &format!(">{header}</td><td>{change}</td>"));
    }
    let redrive = Form::open(console, &start).send();
    shows(&redrive, "INC-17 &#38; &#60;b&#62;");
    let (_, redrives) = http::get(console, "/redrives").unwrap();
    assert_eq!(redrives.matches("href=\"/redrives/").count(), 2, "{redrives}");
    // What a form asks is checked, and what was entered is kept.
    let invalid = Form::open(console, &plan.path).fill("rate", "fast").refused(400);
    assert!(
        invalid.contains("`rate` must be") && invalid.contains("value=\"fast\""),
        "{invalid}"
    );

    // A group and a pipeline change their states, with a reason.
    let resolve = Form::open(console, &button(&group, "/act/group?id="));
    shows(&resolve.fill("reason", "fixed").send(), ": fixed");
    let pause = button("/pipelines/docs", "/act/control?name=pipeline");
    let without_reason = Form::open(console, &pause).refused(400);
    assert!(
        without_reason.contains("`reason` is required"),
        "{without_reason}"
    );
    let paused = Form::open(console, &pause).fill("reason", "INC-17").send();
    shows(&paused, "paused</span> by");
    shows("/due?waiting=1", "wait until it is resumed.");
    let entries = shows("/audit?action=control.pause", "pipeline/docs");
    assert_eq!(entries.matches("INC-17").count(), 1, "{entries}");
    let stale = Form::open(console, &pause)
        .fill("reason", "again")
        .fill("revision", "0");
    assert!(stale.refused(409).contains("Changed meanwhile"));

    // A job is scheduled and cancelled. The forecast applies the rate of its application.
    Form::open(console, "/act/control?name=app%2Fdocs&verb=rate")
        .fill("rate", "0.001")
        .fill("reason", "INC-17")
        .send();
    shows("/due", "At 0.001/s, these ");
    let job = Form::open(console, "/act/job?verb=schedule&app=docs")
        .fill("due", "1h")
        .send();
    let cancel = format!("/act/job?id={}&verb=cancel", job.strip_prefix("/jobs/").unwrap());
    shows(
        &Form::open(console, &cancel).fill("reason", "paid").send(),
        "cancelled",
    );
    let too_late = Form::open(console, &cancel.replace("verb=cancel", "verb=reschedule"));
    assert!(
        too_late
            .fill("due", "2h")
            .refused(409)
            .contains("already cancelled")
    );

    // A schedule is triggered once, also by forms that overtake each other.
    let mut create = binary("redeliver");
    create
        .env(
            "REDELIVER_CONFIG",
            between(&greeting, "export REDELIVER_CONFIG=", "\n"),
        )
        .args(["schedules", "create", "hourly", "--app", "docs", "--every", "1h"]);
    let created = run(create);
    assert_eq!(created.code, Some(0), "{created:?}");
    let trigger = Form::open(console, "/act/schedule?id=hourly&verb=trigger");
    let [first, second] = std::thread::scope(|scope| {
        let sending = [(); 2].map(|()| scope.spawn(|| trigger.send()));
        sending.map(|sent| sent.join().unwrap())
    });
    assert!(first == second && first.starts_with("/jobs/"), "{first} {second}");
}

#[test]
fn pages_and_their_commands_work() {
    let (_demo, console, greeting) = demo();
    let config = between(&greeting, "export REDELIVER_CONFIG=", "\n");
    let group = link(console, "/groups", "/groups/");
    let letter = link(console, "/letters", "/letters/docs-dlq/");
    let job = link(console, "/jobs", "/jobs/");
    for (page, shown) in [
        ("/", "What is wrong"),
        ("/pipelines/docs", "Where records wait"),
        ("/due?waiting=1", "Retries in the next 60 minutes"),
        ("/groups", "http.422"),
        (
            "/groups?show=all&sort=count&filter=error_code%20%3D%20%22http.422%22",
            "http.422",
        ),
        (&group, "Newest dead letters"),
        (&format!("{group}?common=1"), "key begins with"),
        ("/letters?filter=error_class%20%3D%20%22permanent%22", "docs-dlq/"),
        (&letter, "Trace the record"),
        (&format!("{letter}?life=1"), "class=\"timeline\""),
        (&format!("{letter}?form=hex"), "000000  7b "),
        ("/redrives", "No redrive was planned yet"),
        ("/waiting?scan=counts&pipeline=docs", "30s"),
        ("/waiting?scan=records&place=30s&code=http.500", "docs-retry-30s/"),
        (&job, "Application"),
        ("/jobs?app=docs", "scheduled"),
        ("/jobs", "Due now"),
        ("/jobs?until=30d", "Idempotency key"),
        ("/schedules", "No schedule"),
        ("/trace?position=docs/0/0", "entered the pipeline"),
        ("/find?by=key&has=no-such-key", "No such record waits"),
        (
            "/find?by=header&has=error-code%3Dhttp.422&pipeline=docs&since=1h",
            "href=\"/trace?position=docs-dlq%2F",
        ),
        ("/audit?action=dead-letters.*&since=1h", "dead-letters.get"),
    ] {
        check(console, config, page, shown);
    }
    // What the script of an open list asks, while more letters die.
    for page in [
        "/letters?filter=error_code%20%3D%20%22x%22%20OR%20error_code%20%3D%20%22http.422%22",
        "/groups?sort=new",
    ] {
        let (_, body) = http::get(console, page).unwrap();
        let news = unescaped(between(&body, "data-news=\"", "\""));
        eventually(&news, DEADLINE, || match http::get(console, &news) {
            Ok((200, text)) if text.contains("new dead letter") => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }
    let payload = http::exchange(
        Method::GET,
        console,
        &format!("{letter}/payload"),
        &[],
        String::new(),
    );
    let payload = payload.unwrap();
    assert!(
        payload.status == 200 && payload.body.contains("number"),
        "{payload:?}"
    );
    assert_eq!(payload.headers["content-type"], "application/octet-stream");
    for (text, page) in [
        ("doc", "/pipelines/docs"),
        ("HTTP.422", &group),
        ("docs-dlq/0/0", "/letters/docs-dlq/0/0"),
    ] {
        link(console, &format!("/find?q={}", text.replace('/', "%2F")), page);
    }
    for (page, status) in [
        ("/groups/0000000000000000", 404),
        ("/letters/docs-dlq/0/999999", 404),
        ("/jobs/nonsense", 400),
        ("/jobs?from=soon", 400),
        ("/trace?position=nonsense", 400),
        ("/groups?filter=nonsense", 400),
        ("/letters/docs-dlq/x/1", 400),
        ("/letters?page=1&page=2", 400),
        ("/act/plan", 400),
        ("/act/job?verb=burn", 400),
        ("/missing", 404),
    ] {
        let (found, body) = http::get(console, page).unwrap();
        assert_eq!(found, status, "{page}: {body}");
        assert!(body.contains("class=\"problem\""), "{page}: {body}");
    }
}

/// How a record begins that the endpoint of [`SignIn`] does not reject, but fails for now.
const WAITS: &[u8] = br#"{"waits":"#;

/// The settings of a console whose viewers enter tokens.
const WITH_TOKENS: &str = "  sign_in: token\n";

/// The program with sign-in, at a real inspector.
struct SignIn {
    address: SocketAddr,
    console: ServiceProcess,
    inspector: ServiceProcess,
    pipe: Pipe,
}

impl SignIn {
    /// With these tokens and their scopes, and more settings of the inspector. The endpoint of the pipeline rejects records, and
    /// repeats them, except those that begin with [`WAITS`] or `busy`: they wait for an hour, and are accepted then.
    fn start(tokens: &[(&str, &str)], settings: &[String]) -> Self {
        Self::start_with(tokens, settings, "", WITH_TOKENS)
    }

    /// As [`SignIn::start`], with more pipelines, which only the inspector knows, and these settings of the console.
    fn start_with(tokens: &[(&str, &str)], settings: &[String], pipelines: &str, console: &str) -> Self {
        let entry = |(index, (token, scopes)): (usize, &(&str, &str))| {
            let hash: String = Sha256::digest(token)
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            format!("  - {{ name: viewer-{index}, sha256: {hash}, scopes: [{scopes}] }}\n")
        };
        let pipe = PipeBuilder::new("console")
            .with_inspector()
            // The same after a restart.
            .set("dlq_inspector.listen", &format!("127.0.0.1:{}", free_port()))
            .set("control.topic", "{name}-control")
            .set("audit.topic", "{name}-audit")
            .tiers(&[3_600_000])
            .behave(|request| {
                let (body, waits) = (&request.body, [WAITS, b"busy"]);
                match request.earlier_calls_of_key {
                    _ if !waits.iter().any(|prefix| body.starts_with(prefix)) => {
                        Reply::Status(422, Vec::new(), body.clone())
                    }
                    0 => Reply::Status(503, Vec::new(), body.clone()),
                    _ => Reply::ok(body.clone()),
                }
            })
            .create();
        let file = pipe.env.directory().join("tokens");
        let tokens: String = tokens.iter().enumerate().map(entry).collect();
        std::fs::write(&file, format!("tokens:\n{tokens}")).unwrap();
        let tokens_file = format!("dlq_inspector.auth.tokens_file={}", file.display());
        let settings = settings.iter().chain([&tokens_file]);
        let arguments: Vec<&str> = settings.flat_map(|setting| ["--set", setting]).collect();
        let env = pipe.env.with_yaml(&(pipe.env.yaml() + pipelines));
        let mut inspector = env.start("dlq-inspector", "a", &arguments);
        let url = format!("console.inspector.url=http://{}", inspector.word_after(" api="));
        // No other service decides about tokens: nothing listens on port 1.
        let scheduler = "console.scheduler.url=http://127.0.0.1:1";
        let settings = ["console.listen=127.0.0.1:0", &url, scheduler];
        let arguments: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        let env = pipe
            .env
            .with_yaml(&format!("{}console:\n{console}", pipe.env.yaml()));
        let mut console = env.start("console", "a", &arguments);
        Self {
            address: console.word_after(" address=").parse().unwrap(),
            console,
            inspector,
            pipe,
        }
    }

    fn sign_in(&self, token: &str) -> http::Answer {
        let origin = format!("http://{}", self.address);
        let headers = [
            ("origin", origin.as_str()),
            ("content-type", "application/x-www-form-urlencoded"),
        ];
        let body = format!("token={token}&return=%2Fletters");
        http::exchange(Method::POST, self.address, "/sign-in", &headers, body).unwrap()
    }

    /// The cookies of who has signed in with this token.
    #[track_caller]
    fn session(&self, token: &str) -> String {
        let signed_in = self.sign_in(token);
        assert_eq!(signed_in.status, 303, "{signed_in:?}");
        let cookies = signed_in.headers.get_all("set-cookie").iter();
        let cookies: Vec<&str> = cookies
            .map(|cookie| cookie.to_str().unwrap().split(';').next().unwrap())
            .collect();
        cookies.join("; ")
    }

    fn get(&self, session: &str, path: &str) -> http::Answer {
        let headers = [("cookie", session)];
        http::exchange(Method::GET, self.address, path, &headers, String::new()).unwrap()
    }

    /// As [`link`], for the viewer with these cookies.
    #[track_caller]
    fn link(&self, session: &str, page: &str, prefix: &str) -> String {
        let start = format!("href=\"{prefix}");
        eventually(page, DEADLINE, || match self.get(session, page) {
            answer if answer.status == 200 && answer.body.contains(&start) => {
                Ok(format!("{prefix}{}", between(&answer.body, &start, "\"")))
            }
            answer => Err(format!("{answer:?}")),
        })
    }
}

/// With a token as large as those of some providers.
#[test]
fn viewers_see_what_their_tokens_permit() {
    let reader = "r".repeat(16 << 10);
    let tokens = [(reader.as_str(), "dead-letters:read"), ("other", "jobs:read")];
    let mut system = SignIn::start(&tokens, &[]);
    let refused = system.sign_in("guessed");
    assert!(
        refused.status == 401 && refused.body.contains("The token is refused"),
        "{refused:?}"
    );
    for (token, status, shown) in [
        (reader.as_str(), 200, "No dead letter"),
        ("other", 403, "Needs the scope dead-letters:read"),
    ] {
        let session = system.session(token);
        let page = system.get(&session, "/letters");
        assert!(page.status == status && page.body.contains(shown), "{page:?}");
        let (_, scope) = tokens.into_iter().find(|(known, _)| *known == token).unwrap();
        let page = system.get(&session, "/permissions");
        assert!(page.status == 200 && page.body.contains(scope), "{page:?}");
    }
    system.console.shut_down();
}

#[test]
fn viewers_cannot_act() {
    let tokens = [
        ("viewer", "dead-letters:read, control:read"),
        ("operator", "dead-letters:*, control:*"),
    ];
    let system = SignIn::start(&tokens, &[]);
    let _enricher = system.pipe.enricher("a");
    let sent = system.pipe.produce(records(3));
    system.pipe.settle(&sent, DEADLINE);
    let [viewer, operator] = ["viewer", "operator"].map(|token| system.session(token));
    let letter = system.link(&operator, "/letters", "/letters/");
    let group = system.link(&operator, "/groups", "/groups/");
    let pipeline = format!("/pipelines/{}", system.pipe.name());
    let mut forms = Vec::new();
    for page in ["/letters", &letter, &group, &pipeline] {
        let shown = system.get(&operator, page).body;
        let links = shown.split("href=\"/act/").skip(1);
        let links: Vec<String> = links
            .map(|rest| unescaped(&format!("/act/{}", rest.split('"').next().unwrap())))
            .collect();
        assert!(
            links.len() >= 3 && !shown.contains("You can view"),
            "{page}: {shown}"
        );
        forms.extend(links);
        let shown = system.get(&viewer, page).body;
        assert!(!shown.contains("\"/act/"), "{page}: {shown}");
        assert!(
            shown.contains("You can view; changing needs the scope"),
            "{page}: {shown}"
        );
    }
    for path in &forms {
        let shown = system.get(&viewer, path);
        assert!(
            shown.status == 403 && !shown.body.contains("class=\"act\""),
            "{path}: {shown:?}"
        );
        // A viewer does not see what an edit begins with.
        let is_named = shown.body.contains("changing needs the scope") || path.starts_with("/act/edit");
        assert!(is_named, "{path}: {shown:?}");
        let form = Form::open_as(&operator, system.address, path);
        assert!(form.fields.len() > 2, "{path}");
    }
    // What is sent anyway is refused.
    for prefix in ["/act/group", "/act/plan", "/act/control"] {
        let path = forms.iter().find(|path| path.starts_with(prefix)).unwrap();
        let form = Form::open_as(&operator, system.address, path).fill("reason", "INC-17");
        let forged = Form {
            cookie: form.cookie.replace(&operator, &viewer),
            ..form
        };
        let refused = forged.refused(403);
        assert!(refused.contains("Not permitted"), "{path}: {refused}");
    }
}

#[test]
fn masked_parts_are_on_no_page() {
    const SECRET: &str = "471100815";
    const HOSTILE: &str = "<script>alert(1)</script>";
    let rules = r#"[{"topics": ["*-dlq"], "key": true, "fields": ["/card/number"], "headers": ["x-card"], "messages": ["[0-9]{9}"]}]"#;
    let settings = [
        format!("dlq_inspector.masking={rules}"),
        "dlq_inspector.redrive.edit=true".to_owned(),
    ];
    let scopes = ["read", "payload", "operate", "edit"].map(|verb| format!("dead-letters:{verb}"));
    let scopes = format!("{}, control:*, audit:read", scopes.join(", "));
    let system = SignIn::start(&[("masked", &scopes), ("all", "'*'")], &settings);
    let _enricher = system.pipe.enricher("a");
    let draft = |is: &str| {
        let value = format!("{{\"{is}\":1,\"html\":\"{HOSTILE}\",\"card\":{{\"number\":\"{SECRET}\"}}}}");
        Draft::new(SECRET, value).header("x-card", SECRET.as_bytes())
    };
    let sent = system.pipe.produce(["dead", "ends", "waits"].map(draft).into());
    let [masked, all] = ["masked", "all"].map(|token| system.session(token));
    let waiting = "/waiting?scan=records";
    system.link(&masked, waiting, "/trace?position=");
    let letter = system.link(&masked, "/letters", "/letters/");
    let group = system.link(&masked, "/groups", "/groups/");
    let id = &letter["/letters/".len()..];
    let plan = format!("/act/plan?kind=redrive&id={id}");
    let start = Form::open_as(&masked, system.address, &plan).send();
    let redrive = system.link(&masked, "/redrives", "/redrives/");
    let mut pages = vec![letter.clone(), group.clone(), plan, start, redrive];
    for page in [
        "/",
        "/due?waiting=1",
        "/find?q=card",
        "/groups",
        "/letters",
        "/redrives",
        "/waiting?scan=counts",
        waiting,
        "/audit",
    ] {
        pages.push(page.to_owned());
    }
    pages.extend(sent.iter().map(|sent| {
        let position = sent.position.to_string().replace('/', "%2F");
        format!("/trace?position={position}")
    }));
    pages.extend([
        format!("{letter}?life=1"),
        format!("{group}?common=1"),
        format!("/pipelines/{}", system.pipe.name()),
        format!("/act/edit?id={id}"),
        format!("/act/group?id={}&verb=note", &group["/groups/".len()..]),
    ]);
    for page in &pages {
        let shown = system.get(&masked, page);
        assert!(!shown.body.contains(SECRET), "{page}: {shown:?}");
    }
    let payload = format!("{letter}/payload");
    for (viewer, name, is_masked) in [(&masked, "payload-masked", true), (&all, "payload", false)] {
        let file = system.get(viewer, &payload);
        assert!(file.body.contains(HOSTILE), "{file:?}");
        assert_eq!(file.body.contains(SECRET), !is_masked, "{file:?}");
        // No browser shows it as a page.
        let disposition = format!("attachment; filename=\"{name}\"");
        assert_eq!(file.headers["content-disposition"], disposition.as_str());
        assert_eq!(file.headers["content-type"], "application/octet-stream");
        assert_eq!(file.headers["x-content-type-options"], "nosniff");
        let policy = file.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
    }
    for page in [letter.as_str(), &format!("{letter}?life=1"), waiting] {
        let shown = system.get(&all, page);
        assert!(
            shown.body.contains(SECRET),
            "the test finds it: {page}: {shown:?}"
        );
    }
}

/// How many changes the audit log knows, and how many jobs there are, which it does not record.
fn changes(console: SocketAddr) -> Vec<usize> {
    let actions = ["control", "groups", "jobs", "redrives", "schedules"];
    let pages = actions.map(|of| format!("/audit?action={of}.*"));
    let more = [
        "/audit?action=waiting.act".to_owned(),
        "/jobs?app=docs".to_owned(),
    ];
    let pages = pages.into_iter().chain(more);
    let count = |page: String| {
        let (status, body) = http::get(console, &page).unwrap();
        assert_eq!(status, 200, "{page}: {body}");
        body.matches("<tr>").count()
    };
    pages.map(count).collect()
}

/// Also not with all that a form would send.
#[test]
#[ignore = "long"]
fn no_get_changes_anything() {
    let house = House::start();
    let console = house.console;
    in_browser::prepare(&house);
    let before = changes(console);
    let waiting = format!("/waiting?scan=records&pipeline={}", house.pipe.name());
    let pages = crawl(console, &["/", &waiting]);
    let mut routes = BTreeSet::new();
    for path in pages.values().filter(|path| path.starts_with("/act/")) {
        routes.insert(path.split('?').next().unwrap());
        let mut form = Form::open(console, path);
        for (name, value) in form.fields.iter_mut().filter(|(_, value)| value.is_empty()) {
            value.push_str(match name.as_str() {
                "due" => "1h",
                "rate" => "5",
                "reason" | "note" => "INC-17",
                _ => "",
            });
        }
        let shown = form.get();
        assert_eq!(shown.status, 200, "{path}: {}", shown.body);
    }
    let expected = [
        "control", "edit", "group", "job", "plan", "redrive", "schedule", "waiting",
    ];
    assert!(
        routes
            .into_iter()
            .eq(expected.map(|route| format!("/act/{route}")))
    );
    assert_eq!(changes(console), before);
}

/// The scheduler of this system is dead from the beginning.
#[test]
fn silent_services_are_named() {
    let mut system = SignIn::start(&[("viewer", "'*'")], &[]);
    let viewer = system.session("viewer");
    let page = "/due?waiting=1";
    let (scheduler, inspector) = ("The scheduler does not answer", "The inspector does not answer");
    let answers = |system: &SignIn| {
        eventually(page, DEADLINE, || {
            let body = system.get(&viewer, page).body;
            let is_shown =
                body.contains(scheduler) && body.contains("due already") && !body.contains(inspector);
            is_shown.then_some(()).ok_or(body)
        });
    };
    let is_silent = |system: &SignIn, path: &str, kept: &str| {
        let body = system.get(&viewer, path).body;
        assert!(body.contains(inspector) && body.contains(kept), "{path}: {body}");
        assert!(body.contains(" data-passes>"), "{path}: {body}");
    };
    answers(&system);

    system.inspector.freeze();
    for path in [
        "/",
        "/groups",
        "/letters",
        "/redrives",
        "/audit",
        "/find?q=letters",
    ] {
        is_silent(&system, path, "<nav");
    }
    // An open page does not repeat a scan.
    for scan in [
        "/waiting?scan=counts",
        "/trace?position=docs/0/0",
        "/find?by=key&has=a&q=letters",
    ] {
        let body = system.get(&viewer, scan).body;
        assert!(
            body.contains(inspector) && !body.contains(" data-passes>"),
            "{scan}: {body}"
        );
    }
    let tells = |system: &SignIn, expected: &str| {
        eventually("/silent", DEADLINE, || {
            let body = system.get(&viewer, "/silent").body;
            (body == expected).then_some(()).ok_or(body)
        });
    };
    tells(&system, inspector);
    is_silent(&system, page, scheduler);
    system.inspector.thaw();
    answers(&system);
    tells(&system, "");

    system.inspector.kill_9();
    is_silent(&system, page, scheduler);
    system.inspector.start_again();
    answers(&system);
}

/// The settings of an inspector that accepts the tokens of an issuer, whose keys are at this address.
fn accepting(issuer: &str, url: &str) -> [String; 3] {
    let keys = format!("{url}/keys");
    let settings = [
        ("issuer", issuer),
        ("audience", AUDIENCE),
        ("jwks_url", keys.as_str()),
    ];
    settings.map(|(key, value)| format!("dlq_inspector.auth.jwt.{key}={value}"))
}

#[test]
fn rotated_keys_need_no_restart() {
    let [old, new, forged] = ["old", "new", "forged"].map(|id| Issuer::new(id).unwrap());
    let issuer = FakeEndpoint::start(|_| Reply::status(404));
    let publish = |keys: &[&Issuer]| {
        let keys = jwks(keys);
        issuer.behave(move |_| Reply::ok(keys.clone()));
    };
    publish(&[&old]);
    let settings = accepting("https://login.test", &issuer.url());
    let system = SignIn::start(&[("other", "jobs:read")], &settings);
    let token = |key: &Issuer| {
        let expires = SystemClock.now().as_millis() / 1_000 + 600;
        let claims = json!({
            "iss": "https://login.test", "aud": AUDIENCE, "sub": "ann", "exp": expires, "scope": "dead-letters:read",
        });
        key.sign(&claims).unwrap()
    };
    let before = system.session(&token(&old));
    publish(&[&old, &new]);
    let after = system.session(&token(&new));
    for session in [&before, &after] {
        assert_eq!(system.get(session, "/letters").status, 200);
    }

    publish(&[&new]);
    // Unknown keys have the published ones read again, a few times per minute.
    let refused = eventually("the old key is refused", DEADLINE, || {
        assert_eq!(system.sign_in(&token(&forged)).status, 401);
        let page = system.get(&before, "/letters");
        if page.status == 401 {
            Ok(page)
        } else {
            Err(page.status)
        }
    });
    assert!(refused.body.contains("Sign in again"), "{refused:?}");
    assert_eq!(system.get(&after, "/letters").status, 200);
}

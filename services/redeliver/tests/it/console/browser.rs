//! A real browser, driven over WebDriver: what it shows, and what is wrong with it.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::prelude::{BASE64_STANDARD, Engine};
use redeliver_testkit::http::{self, Method};
use redeliver_testkit::target::target_directory;
use redeliver_testkit::{Process, eventually};
use serde_json::{Value, json};

use super::{between, unescaped};
use crate::docs::repository;
use crate::support::DEADLINE;

/// Finds what people with a screen reader, a keyboard or weak eyes cannot use.
const AXE: &str = include_str!("axe-core-4.14.1/axe.min.js");
/// Violations of level moderate or worse, with what to look at.
const RUN_AXE: &str = "
    const done = arguments[arguments.length - 1];
    const shown = (rule) => rule.impact + ' ' + rule.id + ': ' + rule.nodes.slice(0, 3).map((node) =>
        node.html.slice(0, 160) + ' ' + node.failureSummary.slice(0, 300)).join(' | ');
    axe.run(document, { resultTypes: ['violations'] }).then(
        (found) => done(found.violations.filter((rule) => rule.impact !== 'minor').map(shown)),
        (error) => done([String(error)]));";
/// Remembers what can be reached with the Tab key, and what was, and whether one sees where one is.
const WATCH_FOCUS: &str = "
    const all = 'a[href], button, input, textarea, select, summary, [tabindex=\"0\"]';
    const reachable = (element) => element.checkVisibility() && element.type !== 'hidden' && !element.closest('dialog');
    window.expected = [...document.querySelectorAll(all)].filter(reachable);
    window.reached = [];
    document.addEventListener('focusin', ({ target }) => reached.push([target, getComputedStyle(target).outlineStyle]));
    return expected.length;";
const FOCUS_FAULTS: &str = "
    const found = reached.filter(([element]) => expected.includes(element));
    const order = found.map(([element]) => expected.indexOf(element));
    const faults = found.filter(([, outline]) => outline === 'none').map(([element]) => 'no outline: ' + element.outerHTML.slice(0, 120));
    expected.forEach((element, index) => {
        if (order[index] !== index) faults.push(`stop ${index} is ${order[index]}: ` + element.outerHTML.slice(0, 120));
    });
    return faults.slice(0, 3);";
/// By how many minutes the shown time is ahead of UTC, if the page shows one.
const ZONE: &str = "
    const shown = document.querySelector('.asof time')?.textContent.match(/^([\\d: -]{19}).*\\(([\\d: -]{19}) UTC\\)$/);
    return shown ? (Date.parse(shown[1] + 'Z') - Date.parse(shown[2] + 'Z')) / 60000 : null;";

/// How a page is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) name: &'static str,
    scheme: &'static str,
    width: u32,
    /// A time zone without summer time, and by how many minutes it is ahead of UTC.
    zone: (&'static str, i64),
    pub(super) scripts: bool,
}

const KOLKATA: (&str, i64) = ("Asia/Kolkata", 330);
const PHOENIX: (&str, i64) = ("America/Phoenix", -420);

impl View {
    const fn new(name: &'static str, scheme: &'static str, width: u32, zone: (&'static str, i64)) -> Self {
        Self {
            name,
            scheme,
            width,
            zone,
            scripts: true,
        }
    }
}

pub(super) const WIDE: View = View::new("light-1440", "light", 1440, KOLKATA);
pub(super) const NARROW: View = View::new("light-390", "light", 390, PHOENIX);
pub(super) const VIEWS: [View; 4] = [
    WIDE,
    View::new("dark-1440", "dark", 1440, PHOENIX),
    NARROW,
    View::new("dark-390", "dark", 390, KOLKATA),
];

/// Not looked at by axe, which is a script.
pub(super) const WITHOUT_SCRIPTS: View = View {
    scripts: false,
    ..View::new("plain-390", "light", 390, PHOENIX)
};

/// The pages whose beginnings are pictures of the docs, with the names of these.
const PICTURES: [(&str, &str); 3] = [
    ("now-paused", "now"),
    ("letters-retried", "dead-letter"),
    ("form-start", "redrive"),
];

/// A session of the WebDriver protocol (<https://www.w3.org/TR/webdriver2/>), whose dozen commands need no crate: the known ones enable
/// features of `serde_json` in every test, or bring the dependencies of a server.
struct Driver {
    address: SocketAddr,
    session: String,
}

impl Driver {
    fn start(address: SocketAddr, capabilities: &Value) -> Self {
        let mut driver = Self {
            address,
            session: String::new(),
        };
        let started = driver.post("", capabilities);
        driver.session = format!("/{}", started["sessionId"].as_str().unwrap());
        driver
    }

    fn exchange(&self, method: Method, command: &str, parameters: &Value) -> Result<Value, String> {
        let path = format!("/session{}{command}", self.session);
        let answer = http::exchange(method, self.address, &path, &[], parameters.to_string()).unwrap();
        let mut body: Value = serde_json::from_str(&answer.body).unwrap();
        match answer.status {
            200 => Ok(body["value"].take()),
            _ => Err(format!("{command}: {body}")),
        }
    }

    fn get(&self, command: &str) -> Value {
        self.exchange(Method::GET, command, &json!({})).unwrap()
    }

    fn post(&self, command: &str, parameters: &Value) -> Value {
        self.exchange(Method::POST, command, parameters).unwrap()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Chromium outlives its driver. A test that fails because of the driver says so already.
        let path = format!("/session{}", self.session);
        drop(http::exchange(
            Method::DELETE,
            self.address,
            &path,
            &[],
            String::new(),
        ));
    }
}

pub(super) struct Browser {
    driver: Driver,
    origin: String,
    screenshots: PathBuf,
    view: View,
    /// What is wrong, of all pages: whoever repairs one wants to see the others.
    pub(super) faults: Vec<String>,
    /// Clicks, and fields that were filled.
    taken: Cell<(u32, u32)>,
    // Dropped after the session.
    _chromedriver: Process,
}

impl Browser {
    pub(super) fn start(console: SocketAddr) -> Self {
        Self::start_at(format!("http://{console}"))
    }

    /// With the scheme, the host and the port at which it finds the console.
    pub(super) fn start_at(origin: String) -> Self {
        let mut command = Command::new("chromedriver");
        command.arg("--port=0");
        let mut chromedriver = Process::spawn(command).unwrap_or_else(|error| {
            panic!("{error:#}: install the Debian packages chromium and chromium-driver")
        });
        let output = chromedriver.wait_for_output("started successfully on port", DEADLINE);
        let port: u16 = between(&output, "started successfully on port ", ".")
            .parse()
            .unwrap();
        let arguments = [
            "--headless=new",
            // For root, as in containers.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-proxy-server",
            "--force-color-profile=srgb",
            "--hide-scrollbars",
            "--lang=en",
        ];
        let capabilities = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "WARNING" },
        } } });
        let screenshots = std::env::var_os("REDELIVER_SCREENSHOTS").map(PathBuf::from);
        let screenshots =
            screenshots.unwrap_or_else(|| target_directory().unwrap().join("console-screenshots"));
        std::fs::create_dir_all(&screenshots).unwrap();
        let mut browser = Self {
            driver: Driver::start(([127, 0, 0, 1], port).into(), &capabilities),
            origin,
            screenshots,
            view: WIDE,
            faults: Vec::new(),
            taken: Cell::default(),
            _chromedriver: chromedriver,
        };
        browser.look_as(WIDE);
        browser
    }

    fn tell(&self, command: &str, parameters: &Value) -> Value {
        let parameters = json!({ "cmd": command, "params": parameters });
        self.driver.post("/goog/cdp/execute", &parameters)
    }

    fn resize(&self, height: u64) {
        let size =
            json!({ "width": self.view.width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.tell("Emulation.setDeviceMetricsOverride", &size);
    }

    /// From the next page on.
    pub(super) fn look_as(&mut self, view: View) {
        self.view = view;
        self.resize(900);
        let scheme = json!([{ "name": "prefers-color-scheme", "value": view.scheme }]);
        self.tell("Emulation.setEmulatedMedia", &json!({ "features": scheme }));
        self.tell(
            "Emulation.setTimezoneOverride",
            &json!({ "timezoneId": view.zone.0 }),
        );
        let without = json!({ "value": !view.scripts });
        self.tell("Emulation.setScriptExecutionDisabled", &without);
    }

    pub(super) fn open(&self, path: &str) {
        let url = format!("{}{path}", self.origin);
        self.driver.post("/url", &json!({ "url": url }));
    }

    pub(super) fn path(&self) -> String {
        self.path_here().unwrap()
    }

    /// The path of the page, or the address of a page that is not of the console.
    fn path_here(&self) -> Result<String, String> {
        let url = self.driver.get("/url").as_str().unwrap().to_owned();
        match url.strip_prefix(&self.origin) {
            Some(path) => Ok(path.split('?').next().unwrap().to_owned()),
            None => Err(url),
        }
    }

    /// Waits for a page to which others lead by themselves.
    pub(super) fn arrives(&self, expected: &str) {
        eventually(expected, DEADLINE, || match self.path_here() {
            Ok(path) if path == expected => Ok(()),
            Ok(elsewhere) | Err(elsewhere) => Err(elsewhere),
        });
    }

    /// The path of the commands of an element, once there is one.
    fn find(&self, using: &str, value: &str) -> String {
        let element = eventually(value, DEADLINE, || {
            let by = json!({ "using": using, "value": value });
            self.driver.exchange(Method::POST, "/element", &by)
        });
        let id = element.as_object().unwrap().values().next().unwrap();
        format!("/element/{}", id.as_str().unwrap())
    }

    fn click_on(&self, element: &str) {
        self.driver.post(&format!("{element}/click"), &json!({}));
        let (clicks, fields) = self.taken.get();
        self.taken.set((clicks + 1, fields));
    }

    /// Clicks the first element, once there is one.
    pub(super) fn click(&self, css: &str) {
        self.click_on(&self.find("css selector", css));
    }

    pub(super) fn follow(&self, text: &str) {
        self.click_on(&self.find("link text", text));
    }

    pub(super) fn fill(&self, name: &str, text: &str) {
        let field = self.find("css selector", &format!("[name=\"{name}\"]"));
        self.driver.post(&format!("{field}/clear"), &json!({}));
        self.driver
            .post(&format!("{field}/value"), &json!({ "text": text }));
        let (clicks, fields) = self.taken.get();
        self.taken.set((clicks, fields + 1));
    }

    /// How many clicks and filled fields there were since the last call.
    pub(super) fn taken(&self) -> (u32, u32) {
        self.taken.take()
    }

    /// Types without a field in mind. Control stays down.
    pub(super) fn press(&self, keys: &str) {
        let mut strokes = Vec::new();
        for key in keys.chars() {
            strokes.push(json!({ "type": "keyDown", "value": key }));
            if key != '\u{e009}' {
                strokes.push(json!({ "type": "keyUp", "value": key }));
            }
        }
        let keyboard = json!({ "type": "key", "id": "keyboard", "actions": strokes });
        self.driver.post("/actions", &json!({ "actions": [keyboard] }));
        let release = self.driver.exchange(Method::DELETE, "/actions", &json!({}));
        release.unwrap();
    }

    /// Waits until a script returns true.
    pub(super) fn holds(&self, script: &str) {
        eventually(script, DEADLINE, || match self.run(script) {
            Value::Bool(true) => Ok(()),
            other => Err(other),
        });
    }

    pub(super) fn focused(&self) -> String {
        let script = "return document.activeElement.id || document.activeElement.localName";
        self.run(script).as_str().unwrap().to_owned()
    }

    /// Waits until the page shows a text: by itself if it is live and has scripts, otherwise it is read again.
    pub(super) fn shows(&self, text: &str) {
        eventually(text, DEADLINE, || {
            let source = self.driver.get("/source").as_str().unwrap().to_owned();
            if source.contains(text) {
                return Ok(());
            }
            if !self.view.scripts || !source.contains(" data-live>") {
                self.driver.post("/refresh", &json!({}));
            }
            Err(source)
        });
    }

    pub(super) fn run(&self, script: &str) -> Value {
        let parameters = json!({ "script": script, "args": [] });
        self.driver.post("/execute/sync", &parameters)
    }

    fn capture(&self, parameters: &Value, file: &Path) {
        let shot = self.tell("Page.captureScreenshot", parameters);
        let png = BASE64_STANDARD.decode(shot["data"].as_str().unwrap()).unwrap();
        std::fs::write(file, png).unwrap();
    }

    /// Takes a screenshot of the page, and looks for what is wrong with it.
    pub(super) fn inspect(&mut self, page: &str) {
        let View {
            name, zone, width, ..
        } = self.view;
        let mut faults = Vec::new();
        let log = self.driver.post("/se/log", &json!({ "type": "browser" }));
        for entry in log.as_array().unwrap() {
            let message = entry["message"].as_str().unwrap();
            // Chromium also reports that a page has the status of an error.
            let is_status = message.contains("Failed to load resource") && !message.contains("/static/");
            faults.extend((!is_status).then(|| message.to_owned()));
        }
        let script = "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]";
        let size = self.run(script);
        if size[0].as_u64() > Some(width.into()) {
            faults.push(format!("scrolls sideways: {}", size[0]));
        }
        if self.view.scripts {
            match self.run(ZONE).as_f64() {
                Some(shown) if shown != f64::from(i32::try_from(zone.1).unwrap()) => {
                    faults.push(format!("is {shown} minutes ahead of UTC, not {}", zone.1));
                }
                _ => {}
            }
            self.run(AXE);
            let parameters = json!({ "script": RUN_AXE, "args": [] });
            let found = self.driver.post("/execute/async", &parameters);
            let found: Vec<String> = serde_json::from_value(found).unwrap();
            faults.extend(found);
        }
        self.resize(size[1].as_u64().unwrap().clamp(500, 5000));
        let file = self.screenshots.join(format!("{page}.{name}.png"));
        self.capture(&json!({ "format": "png" }), &file);
        let picture = PICTURES.iter().find(|(of, _)| *of == page && name == WIDE.name);
        if let Some((_, picture)) = picture
            && std::env::var_os("REDELIVER_UPDATE").is_some()
        {
            let clip = json!({ "x": 0, "y": 0, "width": width, "height": 800, "scale": 1 });
            let file = repository().join(format!("docs/pictures/{picture}.png"));
            self.capture(&json!({ "format": "png", "clip": clip }), &file);
        }
        self.resize(900);
        self.faults
            .extend(faults.into_iter().map(|fault| format!("{page} {name}: {fault}")));
    }

    /// The Tab key reaches everything once, in the order in which it is read.
    pub(super) fn inspect_focus(&mut self, page: &str) {
        let count = self.run(WATCH_FOCUS).as_u64().unwrap();
        // Some more, because what scrolls is reached too.
        let tabs = usize::try_from(count).unwrap() + 20;
        self.press(&"\u{e004}".repeat(tabs));
        let found: Vec<String> = serde_json::from_value(self.run(FOCUS_FAULTS)).unwrap();
        self.faults
            .extend(found.into_iter().map(|fault| format!("{page}: {fault}")));
    }

    pub(super) fn finish(self) {
        assert!(self.faults.is_empty(), "{}", self.faults.join("\n"));
    }
}

/// What kind of page an address leads to, as a name: pages of one kind differ only in their data.
fn kind(address: &str) -> String {
    let (path, query) = address.split_once('?').unwrap_or((address, ""));
    let mut segments = path.split('/').skip(1);
    let first = segments.next().filter(|first| !first.is_empty()).unwrap_or("now");
    let mut kind = match (first, segments.next()) {
        ("act", Some(of)) => format!("form-{of}"),
        (first, Some(_)) => format!("{first}-one"),
        (first, None) => first.to_owned(),
    };
    for parameter in query.split('&') {
        if let Some(("kind" | "verb" | "show" | "life" | "waiting" | "scan", value)) =
            parameter.split_once('=')
        {
            kind = format!("{kind}-{value}");
        }
    }
    kind
}

/// One page of each kind to which links lead, by kind.
pub(super) fn crawl(console: SocketAddr, from: &[&str]) -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    let mut queue: VecDeque<String> = from.iter().map(|&path| path.to_owned()).collect();
    let mut seen = BTreeSet::new();
    while let Some(path) = queue.pop_front() {
        if !seen.insert(kind(&path)) {
            continue;
        }
        let (status, body) = http::get(console, &path).unwrap();
        assert_eq!(status, 200, "{path}: {body}");
        let links = body
            .split("href=\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next());
        let links = links.map(unescaped).filter(|link| {
            link.starts_with('/') && !link.starts_with("/static/") && !link.starts_with("/sign-in")
        });
        queue.extend(links);
        pages.insert(kind(&path), path);
    }
    pages
}

//! A real browser, driven over WebDriver: what it shows, and what is wrong with it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use redeliver_testkit::http;
use redeliver_testkit::target::target_directory;
use redeliver_testkit::{Process, eventually_async};
use serde_json::{Value, json};
use thirtyfour::prelude::*;

use super::{between, unescaped};
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

    pub(super) const fn without_scripts(self) -> Self {
        Self {
            scripts: false,
            ..self
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

pub(super) struct Browser {
    driver: WebDriver,
    origin: String,
    screenshots: PathBuf,
    view: View,
    /// What is wrong, of all pages: whoever repairs one wants to see the others.
    pub(super) faults: Vec<String>,
    // Dropped after the session.
    _chromedriver: Process,
}

impl Browser {
    pub(super) async fn start(console: SocketAddr) -> Self {
        let mut command = Command::new("chromedriver");
        command.arg("--port=0");
        let mut chromedriver = Process::spawn(command).unwrap_or_else(|error| {
            panic!("{error:#}: install the Debian packages chromium and chromium-driver")
        });
        let output = chromedriver.wait_for_output("started successfully on port", DEADLINE);
        let port = between(&output, "started successfully on port ", ".");
        let mut chromium = DesiredCapabilities::chrome();
        for argument in [
            "--headless=new",
            // For root, as in containers.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-proxy-server",
            "--force-color-profile=srgb",
            "--hide-scrollbars",
            "--lang=en",
        ] {
            chromium.add_arg(argument).unwrap();
        }
        chromium
            .set_browser_log_level(thirtyfour::LoggingPrefsLogLevel::Warning)
            .unwrap();
        let driver = WebDriver::builder(format!("http://127.0.0.1:{port}"), chromium).client(http::client());
        let screenshots = std::env::var_os("REDELIVER_SCREENSHOTS").map(PathBuf::from);
        let screenshots =
            screenshots.unwrap_or_else(|| target_directory().unwrap().join("console-screenshots"));
        std::fs::create_dir_all(&screenshots).unwrap();
        let mut browser = Self {
            driver: driver.await.unwrap(),
            origin: format!("http://{console}"),
            screenshots,
            view: WIDE,
            faults: Vec::new(),
            _chromedriver: chromedriver,
        };
        browser.look_as(WIDE).await;
        browser
    }

    async fn tell(&self, command: &str, parameters: Value) -> Value {
        self.driver.cdp().send_raw(command, parameters).await.unwrap()
    }

    async fn resize(&self, height: u64) {
        let size =
            json!({ "width": self.view.width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.tell("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// From the next page on.
    pub(super) async fn look_as(&mut self, view: View) {
        self.view = view;
        self.resize(900).await;
        let scheme = json!([{ "name": "prefers-color-scheme", "value": view.scheme }]);
        self.tell("Emulation.setEmulatedMedia", json!({ "features": scheme }))
            .await;
        self.tell(
            "Emulation.setTimezoneOverride",
            json!({ "timezoneId": view.zone.0 }),
        )
        .await;
        let without = json!({ "value": !view.scripts });
        self.tell("Emulation.setScriptExecutionDisabled", without).await;
    }

    pub(super) async fn open(&self, path: &str) {
        self.driver.goto(format!("{}{path}", self.origin)).await.unwrap();
    }

    pub(super) async fn path(&self) -> String {
        let url = self.driver.current_url().await.unwrap();
        url.path().to_owned()
    }

    async fn find(&self, by: By) -> WebElement {
        self.driver.query(by).first().await.unwrap()
    }

    /// Clicks the first element, once there is one.
    pub(super) async fn click(&self, css: &str) {
        self.find(By::Css(css)).await.click().await.unwrap();
    }

    pub(super) async fn follow(&self, text: &str) {
        self.find(By::LinkText(text)).await.click().await.unwrap();
    }

    pub(super) async fn fill(&self, name: &str, text: &str) {
        let field = self.find(By::Name(name)).await;
        field.clear().await.unwrap();
        field.send_keys(text).await.unwrap();
    }

    /// Types without a field in mind.
    pub(super) async fn press(&self, keys: &str) {
        self.driver
            .action_chain()
            .send_keys(keys)
            .perform()
            .await
            .unwrap();
    }

    pub(super) async fn focused(&self) -> String {
        let script = "return document.activeElement.id || document.activeElement.localName";
        self.run(script).await.as_str().unwrap().to_owned()
    }

    /// Waits until the page shows a text: by itself if it is live and has scripts, otherwise it is read again.
    pub(super) async fn shows(&self, text: &str) {
        eventually_async(text, DEADLINE, async || {
            let source = self.driver.source().await.unwrap();
            if source.contains(text) {
                return Ok(());
            }
            if !self.view.scripts || !source.contains(" data-live>") {
                self.driver.refresh().await.unwrap();
            }
            Err(source)
        })
        .await;
    }

    pub(super) async fn run(&self, script: &str) -> Value {
        self.driver.execute(script, []).await.unwrap().json().clone()
    }

    /// Takes a screenshot of the page, and looks for what is wrong with it.
    pub(super) async fn inspect(&mut self, page: &str) {
        let View {
            name, zone, width, ..
        } = self.view;
        let mut faults = Vec::new();
        for entry in self.driver.browser_log().await.unwrap() {
            // Chromium also reports that a page has the status of an error.
            let is_status =
                entry.message.contains("Failed to load resource") && !entry.message.contains("/static/");
            faults.extend((!is_status).then_some(entry.message));
        }
        let script = "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]";
        let size = self.run(script).await;
        if size[0].as_u64() > Some(width.into()) {
            faults.push(format!("scrolls sideways: {}", size[0]));
        }
        if self.view.scripts {
            match self.run(ZONE).await.as_f64() {
                Some(shown) if shown != f64::from(i32::try_from(zone.1).unwrap()) => {
                    faults.push(format!("is {shown} minutes ahead of UTC, not {}", zone.1));
                }
                _ => {}
            }
            self.run(AXE).await;
            let found = self.driver.execute_async(RUN_AXE, []).await.unwrap();
            let found: Vec<String> = found.convert().unwrap();
            faults.extend(found);
        }
        self.resize(size[1].as_u64().unwrap().clamp(500, 5000)).await;
        let shot = self
            .tell("Page.captureScreenshot", json!({ "format": "png" }))
            .await;
        self.resize(900).await;
        let png = thirtyfour::support::base64_decode(shot["data"].as_str().unwrap()).unwrap();
        std::fs::write(self.screenshots.join(format!("{page}.{name}.png")), png).unwrap();
        self.faults
            .extend(faults.into_iter().map(|fault| format!("{page} {name}: {fault}")));
    }

    /// The Tab key reaches everything once, in the order in which it is read.
    pub(super) async fn inspect_focus(&mut self, page: &str) {
        let count = self.run(WATCH_FOCUS).await.as_u64().unwrap();
        // Some more, because what scrolls is reached too.
        let tabs = usize::try_from(count).unwrap() + 20;
        self.press(&"\u{e004}".repeat(tabs)).await;
        let found: Vec<String> = serde_json::from_value(self.run(FOCUS_FAULTS).await).unwrap();
        self.faults
            .extend(found.into_iter().map(|fault| format!("{page}: {fault}")));
    }

    pub(super) async fn finish(self) {
        assert!(self.faults.is_empty(), "{}", self.faults.join("\n"));
        self.driver.quit().await.unwrap();
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

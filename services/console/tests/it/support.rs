//! A console, what it calls, and a browser.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use redeliver_console::{Console, Sections};
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::listen::Listener;
use redeliver_testkit::{FakeEndpoint, Reply, http};
use reqwest::header::{COOKIE, HOST, LOCATION, ORIGIN, SET_COOKIE};
use reqwest::{Client, Method, redirect};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use url::form_urlencoded::Serializer;

/// The public name of the console.
pub(crate) const HOST_NAME: &str = "console.example";

/// A service that tests need.
pub(crate) struct Service {
    endpoint: FakeEndpoint,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Service {
    /// One that refuses each call: as unauthenticated, or as not permitted if its token is accepted.
    pub(crate) fn start(accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self::answering(move |_, token| (if accepts(token) { "7" } else { "16" }, Vec::new()))
    }

    /// One that answers each call with an empty message, and says which scopes a token has.
    pub(crate) fn with_scopes(scopes: impl Fn(&str) -> Vec<&'static str> + Send + Sync + 'static) -> Self {
        Self::answering(move |path, token| {
            let mut message = Vec::new();
            if path.ends_with("/GetAccess") {
                for scope in scopes(token) {
                    // The field 1, with its length.
                    message.extend([0x0a, u8::try_from(scope.len()).unwrap()]);
                    message.extend(scope.as_bytes());
                }
            }
            let length = u32::try_from(message.len()).unwrap().to_be_bytes();
            ("0", [&[0][..], &length, &message].concat())
        })
    }

    /// One that answers with a status and a message.
    fn answering(answer: impl Fn(&str, &str) -> (&'static str, Vec<u8>) + Send + Sync + 'static) -> Self {
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let tokens = seen.clone();
        let endpoint = FakeEndpoint::start(move |request| {
            let sent = request.headers.get("authorization");
            let sent = sent.map_or("", |sent| sent.to_str().unwrap());
            let token = sent.trim_start_matches("Bearer ");
            tokens
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(token.to_owned());
            let (status, message) = answer(&request.path, token);
            let headers = [("content-type", "application/grpc"), ("grpc-status", status)];
            let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
            Reply::Status(200, headers.to_vec(), message.into())
        });
        Self { endpoint, seen }
    }

    /// The tokens of all calls so far; an empty text for a call without one.
    pub(crate) fn tokens(&self) -> Vec<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A console that serves until it is dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    _serving: JoinSet<std::io::Result<()>>,
}

impl Running {
    /// Starts a console with these settings, which calls this service for everything.
    pub(crate) fn start(service: &Service, settings: &str) -> Self {
        let url = service.endpoint.url();
        let yaml = format!(
            "console:\n  hosts: [{HOST_NAME}]\n  inspector: {{ url: '{url}' }}\n  scheduler: {{ url: '{url}' }}\n{settings}"
        );
        let config = ProgramConfig::<Sections>::from_yaml(&yaml).unwrap();
        let listener = Listener::bind("console.listen", (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let console = Console::new(&config.own.console).unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(console.serve(listener, CancellationToken::new()));
        Self {
            address,
            _serving: serving,
        }
    }
}

/// A browser that keeps cookies, and follows no redirect.
#[derive(Clone)]
pub(crate) struct Browser {
    client: Client,
    address: SocketAddr,
    pub(crate) cookies: BTreeMap<String, String>,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) location: String,
    /// The headers that set cookies.
    pub(crate) set: Vec<String>,
    pub(crate) body: String,
}

impl Browser {
    pub(crate) fn new(console: &Running) -> Self {
        // Installs the crypto provider that clients need.
        drop(http::client());
        let client = Client::builder().no_proxy().redirect(redirect::Policy::none());
        Self {
            client: client.build().unwrap(),
            address: console.address,
            cookies: BTreeMap::new(),
        }
    }

    /// The same browser at another replica.
    pub(crate) fn at(&self, console: &Running) -> Self {
        Self {
            address: console.address,
            ..self.clone()
        }
    }

    pub(crate) async fn get(&mut self, path: &str) -> Answer {
        self.send(Method::GET, path, "", &[]).await
    }

    /// Sends a form of a page of this origin.
    pub(crate) async fn post(&mut self, path: &str, origin: &str, fields: &[(&str, &str)]) -> Answer {
        self.send(Method::POST, path, origin, fields).await
    }

    async fn send(&mut self, method: Method, path: &str, origin: &str, fields: &[(&str, &str)]) -> Answer {
        let mut request = self
            .client
            .request(method, format!("http://{}{path}", self.address));
        request = request.header(HOST, HOST_NAME);
        if !origin.is_empty() {
            request = request
                .header(ORIGIN, origin)
                .header("content-type", "application/x-www-form-urlencoded")
                .body(Serializer::new(String::new()).extend_pairs(fields).finish());
        }
        let cookies = self.cookies.iter().map(|(name, value)| format!("{name}={value}"));
        let cookies = cookies.collect::<Vec<_>>().join("; ");
        let response = request.header(COOKIE, cookies).send().await.unwrap();
        let text = |value: &reqwest::header::HeaderValue| value.to_str().unwrap().to_owned();
        let headers = response.headers();
        let set: Vec<String> = headers.get_all(SET_COOKIE).iter().map(text).collect();
        for cookie in &set {
            let (name, value) = cookie.split(';').next().unwrap().split_once('=').unwrap();
            if cookie.contains("Max-Age=0") {
                self.cookies.remove(name);
            } else {
                self.cookies.insert(name.to_owned(), value.to_owned());
            }
        }
        Answer {
            status: response.status().as_u16(),
            location: headers.get(LOCATION).map_or_else(String::new, text),
            set,
            body: response.text().await.unwrap(),
        }
    }
}

//! Forms that change something. Each has a token, which the browser also has in a cookie, and an id, so that a repeated one acts once.

use std::convert::Infallible;

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, IntoResponseParts, Response, ResponseParts};
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use subtle::ConstantTimeEq as _;

use crate::cookie_keys;
use crate::cookies::{self, SameSite};
use crate::page::{Failed, Part, Problem};
use crate::site::Site;

/// What a form asks.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) label: &'static str,
    pub(crate) value: String,
    pub(crate) input: Input,
    pub(crate) help: String,
    pub(crate) is_required: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Input {
    Hidden,
    Line,
    /// With this number of rows.
    Lines(u8),
    Check,
}

impl Field {
    pub(crate) fn new(
        input: Input,
        name: &'static str,
        label: &'static str,
        value: impl Into<String>,
    ) -> Self {
        Self {
            name,
            label,
            value: value.into(),
            input,
            help: String::new(),
            is_required: false,
        }
    }

    pub(crate) fn hidden(name: &'static str, value: impl Into<String>) -> Self {
        Self::new(Input::Hidden, name, "", value)
    }

    pub(crate) fn line(name: &'static str, label: &'static str, value: impl Into<String>) -> Self {
        Self::new(Input::Line, name, label, value)
    }

    pub(crate) fn check(name: &'static str, label: &'static str, value: impl Into<String>) -> Self {
        Self::new(Input::Check, name, label, value)
    }

    pub(crate) fn reason(value: &str) -> Self {
        Self::line("reason", "Reason", value).help("For the audit log, at most 1000 bytes.")
    }

    pub(crate) fn help(self, help: impl Into<String>) -> Self {
        Self {
            help: help.into(),
            ..self
        }
    }

    pub(crate) fn is_hidden(&self) -> bool {
        matches!(self.input, Input::Hidden)
    }

    pub(crate) fn required(self) -> Self {
        Self {
            is_required: true,
            ..self
        }
    }
}

/// The value of a field that is not a text; `None` if it is empty.
pub(crate) fn parsed<T>(name: &str, value: &str, expected: &str) -> Part<Option<T>>
where
    T: std::str::FromStr,
{
    match value.trim() {
        "" => Ok(None),
        value => {
            let invalid = |_| Problem::invalid(format!("`{name}` must be {expected}; it is `{value}`."));
            value.parse().map(Some).map_err(invalid)
        }
    }
}

/// The text of a field that must be filled in.
pub(crate) fn required<'v>(name: &str, value: &'v str) -> Part<&'v str> {
    match value.trim() {
        "" => Err(Problem::invalid(format!("`{name}` is required."))),
        value => Ok(value),
    }
}

/// The reason for the audit log, which APIs refuse if it is longer.
pub(crate) fn reason(value: &str) -> Part<&str> {
    match value.trim() {
        long if long.len() > MAX_REASON => Err(Problem::invalid(format!(
            "`reason` must have at most {MAX_REASON} bytes; it has {}.",
            long.len()
        ))),
        reason => Ok(reason),
    }
}

const MAX_REASON: usize = 1_000;

/// What a browser must send with each form, in a field and in a cookie. Another site sees neither.
pub(crate) struct Token {
    text: String,
    /// Where the browser does not have it yet.
    new_for: Option<Site>,
}

const BYTES: usize = 16;

impl Token {
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// The id of a new form.
pub(crate) fn id() -> String {
    random()
}

fn random() -> String {
    hex(&cookie_keys::random::<BYTES>())
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_random(text: &str) -> bool {
    text.len() == 2 * BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

const COOKIE: &str = "form";

impl<S: Sync> FromRequestParts<S> for Token {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, StatusCode> {
        let site = Site::from_request_parts(parts, state).await?;
        let known = cookies::get(&parts.headers, &site, COOKIE).filter(|text| is_random(text));
        Ok(Self {
            text: known.map_or_else(random, str::to_owned),
            new_for: known.is_none().then_some(site),
        })
    }
}

/// Sets the cookie.
impl IntoResponseParts for Token {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        if let Some(site) = self.new_for {
            let cookie = cookies::set(&site, COOKIE, &self.text, SameSite::Strict, None);
            response.headers_mut().append(header::SET_COOKIE, cookie);
        }
        Ok(response)
    }
}

/// A form that was sent.
pub(crate) struct Form<T> {
    pub(crate) fields: T,
    pub(crate) token: Token,
    /// The id of the form.
    pub(crate) id: String,
    /// What APIs recognise a repetition by: the same form with the same content.
    pub(crate) request_id: String,
    /// Whether a page of this console was sent back. If not, nothing may be changed.
    pub(crate) genuine: Part<()>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Envelope {
    token: String,
    form: String,
}

/// The fields of a form, and the most bytes that they can have.
pub(crate) trait Fields: DeserializeOwned {
    const MAX_BYTES: usize = 64 << 10;
}

impl<S: Send + Sync, T: Fields> FromRequest<S> for Form<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let (mut parts, body) = request.into_parts();
        let token = Token::from_request_parts(&mut parts, state).await;
        let token = token.map_err(IntoResponse::into_response)?;
        let Ok(body) = axum::body::to_bytes(body, T::MAX_BYTES).await else {
            let problem = Problem {
                status: StatusCode::PAYLOAD_TOO_LARGE,
                title: "Too large".to_owned(),
                detail: format!("A form has at most {} bytes. Nothing was changed.", T::MAX_BYTES),
                advice: "Use the command line.".to_owned(),
                passes: false,
            };
            return Err(Failed::respond("", problem));
        };
        let invalid = |error: serde_urlencoded::de::Error| {
            Failed::respond("", Problem::invalid(format!("{error}. Nothing was changed.")))
        };
        let fields = serde_urlencoded::from_bytes(&body).map_err(invalid)?;
        let envelope: Envelope = serde_urlencoded::from_bytes(&body).map_err(invalid)?;
        let is_same = envelope.token.as_bytes().ct_eq(token.text.as_bytes());
        let is_genuine = token.new_for.is_none() && bool::from(is_same) && is_random(&envelope.form);
        let content = digest(&SHA256, &body);
        Ok(Self {
            fields,
            token,
            request_id: format!("{}-{}", envelope.form, hex(&content.as_ref()[..BYTES])),
            id: if is_genuine { envelope.form } else { id() },
            genuine: if is_genuine { Ok(()) } else { Err(forged()) },
        })
    }
}

fn forged() -> Problem {
    Problem {
        status: StatusCode::FORBIDDEN,
        title: "Not sent".to_owned(),
        detail:
            "The form was opened in another session, or the browser keeps no cookies. Nothing was changed."
                .to_owned(),
        advice: "Check what is entered, and send it again.".to_owned(),
        passes: false,
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Asked {
        reason: String,
    }

    impl Fields for Asked {}

    async fn sent(cookie: &str, body: String) -> Result<Form<Asked>, StatusCode> {
        let site = Site {
            origin: "http://localhost".to_owned(),
            is_secure: false,
        };
        let request = Request::post("/act")
            .header(header::COOKIE, cookie)
            .extension(site);
        let request = request.body(Body::from(body)).unwrap();
        Form::from_request(request, &())
            .await
            .map_err(|response| response.status())
    }

    #[tokio::test]
    async fn only_own_forms_are_genuine() {
        let (token, id) = (random(), random());
        let body = |token: &str| format!("token={token}&form={id}&reason=a%26b");
        let cookie = |token: &str| format!("other=1; redeliver-80-form={token}");
        let form = sent(&cookie(&token), body(&token)).await.unwrap();
        assert!(form.genuine.is_ok() && form.token.new_for.is_none());
        assert_eq!((&*form.fields.reason, &form.id), ("a&b", &id));
        for (cookie, body) in [
            (cookie(&token), body("")),
            (cookie(&token), body(&random())),
            (cookie(&token), "reason=x".to_owned()),
            (cookie(""), body("")),
            (String::new(), body("")),
            (cookie("x"), body("x")),
        ] {
            let form = sent(&cookie, body.clone()).await.unwrap();
            let problem = form.genuine.unwrap_err();
            assert_eq!(problem.status, StatusCode::FORBIDDEN, "{cookie} {body}");
            assert!(!form.fields.reason.is_empty(), "what was entered is kept");
        }
    }

    #[tokio::test]
    async fn repeated_forms_have_one_request_id() {
        let (token, id) = (random(), random());
        let request_id = async |reason: &str| {
            let body = format!("token={token}&form={id}&reason={reason}");
            let form = sent(&format!("redeliver-80-form={token}"), body).await.unwrap();
            assert!(form.request_id.len() <= 100);
            form.request_id
        };
        let expected = format!("token={token}&form={id}&reason=a");
        let expected = hex(&digest(&SHA256, expected.as_bytes()).as_ref()[..BYTES]);
        assert_eq!(request_id("a").await, format!("{id}-{expected}"));
        assert_ne!(request_id("a").await, request_id("b").await);
    }

    #[test]
    fn long_reasons_are_refused() {
        let long = "x".repeat(1_000);
        assert_eq!(reason(&format!(" {long} ")).unwrap(), long);
        assert!(
            reason(&(long + "x"))
                .unwrap_err()
                .detail
                .contains("at most 1000 bytes")
        );
    }

    #[tokio::test]
    async fn unusable_bodies_are_refused() {
        let status = async |body: String| sent("", body).await.map(|_| ()).unwrap_err();
        let large = format!("reason={}", "x".repeat(Asked::MAX_BYTES));
        assert_eq!(status(large).await, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(
            status("reason=a&reason=b".to_owned()).await,
            StatusCode::BAD_REQUEST
        );
        assert_eq!(status("unknown=1".to_owned()).await, StatusCode::BAD_REQUEST);
    }
}

//! The headers of every request, some of them from files.

use redeliver_runtime::config::{Secret, header_name, header_value};
use redeliver_runtime::watched_files::WatchedFiles;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue, USER_AGENT};

use super::settings::{HttpSettings, HttpSetupError};

/// Reads the files. They are one set: while one of them cannot be used, the previous values of all of them stay in use.
pub(super) fn load(settings: &HttpSettings) -> Result<WatchedFiles<HeaderMap>, HttpSetupError> {
    let mut fixed = HeaderMap::new();
    fixed.insert(
        USER_AGENT,
        HeaderValue::from_static(concat!("redeliver-enricher/", env!("CARGO_PKG_VERSION"))),
    );
    for (name, value) in &settings.headers {
        let wrong = |problem: &str| settings.wrong(&format!("headers.{name}"), problem);
        let header = header_name(name).map_err(wrong)?;
        add(&mut fixed, &header, header_value(value).map_err(wrong)?);
    }
    let (mut names, mut files) = (Vec::new(), Vec::new());
    for (name, path) in &settings.header_files {
        let field = format!("header_files.{name}");
        names.push(header_name(name).map_err(|problem| settings.wrong(&field, problem))?);
        files.push(settings.file(&field, path));
    }
    Ok(WatchedFiles::load(files, move |contents| {
        let mut headers = fixed.clone();
        for (name, file) in names.iter().zip(contents) {
            let secret = Secret::in_file(file.bytes, file.path()).map_err(|problem| file.problem(problem))?;
            let value = header_value(secret.expose()).map_err(|problem| file.problem(problem))?;
            add(&mut headers, name, value);
        }
        Ok(headers)
    })?)
}

fn add(headers: &mut HeaderMap, name: &HeaderName, mut value: HeaderValue) {
    // Any of them may be an API key.
    value.set_sensitive(true);
    if name == USER_AGENT {
        headers.insert(name, value);
    } else {
        headers.append(name, value);
    }
}

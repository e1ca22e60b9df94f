//! Who looks at the page that is made.

use redeliver_core::failure::bounded_text;

use crate::page::address;

tokio::task_local! {
    static VIEWER: Viewer;
}

/// The viewer of a page.
#[derive(Clone, Debug, Default)]
pub(crate) struct Viewer {
    /// Whether viewers sign in here.
    pub(crate) signs_in: bool,
    /// The name, if the token says it.
    pub(crate) name: Option<String>,
    /// The address of the page, without its host.
    pub(crate) page: String,
}

impl Viewer {
    pub(crate) fn new(name: Option<&str>, page: &str) -> Self {
        Self {
            signs_in: true,
            name: name.map(|name| bounded_text(name, 100)),
            page: page.to_owned(),
        }
    }

    /// The viewer of the page that this task makes; nobody outside of a page.
    pub(crate) fn current() -> Self {
        VIEWER.try_with(Clone::clone).unwrap_or_default()
    }

    /// Makes a page for this viewer.
    pub(crate) async fn view<T>(self, page: impl Future<Output = T>) -> T {
        VIEWER.scope(self, page).await
    }

    /// Where to sign in with another token, to come back to this page.
    pub(crate) fn sign_in_again(&self) -> Option<String> {
        let parameters = [("again", "1"), ("return", self.page.as_str())];
        self.signs_in.then(|| address("/sign-in", &parameters))
    }
}

//! Lists that stay open while letters die.

use super::SignIn;
use super::browser::{Browser, WITHOUT_SCRIPTS};
use crate::support::records;

/// A script that tells whether the list says this, and has so many rows.
fn says(text: &str, rows: usize) -> String {
    format!(
        "return document.querySelector('.news:not([hidden]) span')?.textContent === '{text}' \
         && document.querySelectorAll('.list tbody tr').length === {rows}"
    )
}

/// A script that tells whether the list has so many rows, and nothing is new.
fn has(rows: usize) -> String {
    format!(
        "return document.querySelector('.news').hidden && document.querySelectorAll('.list tbody tr').length === {rows}"
    )
}

#[test]
#[ignore = "long"]
fn open_lists_tell_what_is_new() {
    let system = SignIn::start(&[("viewer", "'*'")], &[]);
    let _enricher = system.pipe.enricher("a");
    let mut browser = Browser::start(system.address);
    browser.open("/letters?filter=state%20%3D%20OPEN");
    browser.fill("token", "viewer");
    browser.click(".next");
    browser.shows("No dead letter");
    browser.holds(&has(0));
    system.pipe.produce(records(3));
    browser.holds(&says("3 new dead letters", 0));
    browser.inspect("letters-new");
    browser.follow("Show");
    browser.holds(&has(3));

    browser.open("/groups");
    browser.holds(&has(1));
    system.pipe.produce(records(1));
    browser.holds(&says("1 group has new dead letters", 1));
    browser.inspect("groups-new");
    // The page is read again where it is.
    browser.press("r");
    browser.holds(&has(1));

    browser.look_as(WITHOUT_SCRIPTS);
    browser.open("/letters");
    browser.holds(&has(4));
    browser.finish();
}

use proptest::prelude::*;

use super::*;

fn texts(document: &str, pointers: &[&str]) -> Vec<Option<String>> {
    let found = at_each(document.as_bytes(), pointers).unwrap_or_else(|error| panic!("{document}: {error}"));
    found
        .into_iter()
        .map(|value| Some(value?.get().to_owned()))
        .collect()
}

fn text(document: &str, pointer: &str) -> Option<String> {
    let scalar = scalar_at(document.as_bytes(), pointer).unwrap()?;
    Some(String::from_utf8(scalar.into_text().into_owned()).unwrap())
}

#[test]
fn values_are_found_at_pointers() {
    let document = r#" { "a" : { "b" : [ 1 , { "c" : 2.50 } ] , "b~" : 3 } , "" : { "" : 4 } , "x/y" : 5, "\u007a" : 6 } "#;
    for (pointer, expected) in [
        ("/a/b/0", Some("1")),
        ("/a/b/1/c", Some("2.50")),
        ("/a/b~0", Some("3")),
        ("//", Some("4")),
        ("/x~1y", Some("5")),
        ("/z", Some("6")),
        ("/a/b/2", None),
        ("/a/b/01", None),
        ("/a/b/+1", None),
        ("/a/b/-", None),
        ("/a/b/0/c", None),
        ("/none", None),
        ("a", None),
    ] {
        assert_eq!(texts(document, &[pointer])[0].as_deref(), expected, "{pointer}");
    }
    assert_eq!(texts(document, &[""])[0].as_deref(), Some(document.trim()));
    let several = texts(document, &["/a/b/1/c", "/none", "/a/b~0", "/a/b/1/c"]);
    let several: Vec<_> = several.iter().map(Option::as_deref).collect();
    assert_eq!(several, [Some("2.50"), None, Some("3"), Some("2.50")]);
}

#[test]
fn the_last_of_several_fields_counts() {
    assert_eq!(text(r#"{"a":{"b":1},"a":{"b":2}}"#, "/a/b").as_deref(), Some("2"));
    assert_eq!(text(r#"{"a":{"b":1},"a":{}}"#, "/a/b"), None);
}

#[test]
fn other_values_are_not_evaluated() {
    for other in [
        "1e400",
        &"9".repeat(400),
        r#""\ud800""#,
        r#""\udc00\ud800x""#,
        r#"{"\ud800":1}"#,
        &format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)),
    ] {
        let document = format!(r#"{{"x":{other},"id":"a","\ud800":{other}}}"#);
        assert_eq!(text(&document, "/id").as_deref(), Some("a"));
    }
}

#[test]
fn deep_pointers_need_no_stack() {
    let depth = 20_000;
    let document = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    assert_eq!(texts(&document[..], &[&"/1".repeat(depth)]), [None]);
    let pointer = "/0".repeat(500);
    let document = format!("{}1{}", "[".repeat(500), "]".repeat(500));
    assert_eq!(text(&document, &pointer).as_deref(), Some("1"));
}

#[test]
fn scalars_keep_what_the_document_says() {
    for (value, expected) in [
        (r#""a\u00e9\ud83d\ude00""#, Some("aé😀")),
        ("true", Some("true")),
        ("false", Some("false")),
        ("18446744073709551617", Some("18446744073709551617")),
        ("1.50", Some("1.5")),
        ("null", None),
        ("[1]", None),
        ("{}", None),
    ] {
        assert_eq!(text(&format!("[{value}]"), "/0").as_deref(), expected, "{value}");
    }
    let lone = scalar_at(br#"["\ud800"]"#, "/0").unwrap().unwrap();
    assert_eq!(&*lone.into_text(), b"\xed\xa0\x80");
}

#[test]
fn private_serde_names_are_names() {
    let hidden =
        r#"{"$serde_json::private::RawValue":"{\"id\":\"forged\"}","$serde_json::private::Number":"1"}"#;
    assert_eq!(text(hidden, "/id"), None);
    assert_eq!(
        text(hidden, "/$serde_json::private::Number").as_deref(),
        Some("1")
    );
    assert_eq!(text(&format!("[{hidden}]"), "/0"), None);
}

#[test]
fn other_bytes_are_refused() {
    for other in [
        &b""[..],
        b"{",
        b"1 2",
        b"nul",
        b"{\"a\":}",
        b"\"\xff\"",
        b"{\"\xff\":1}",
        b"\xef\xbb\xbf{}",
        b"[1,]",
        b"[01]",
        b"\"\x01\"",
    ] {
        for pointer in ["", "/a"] {
            assert!(scalar_at(other, pointer).is_err(), "{}", other.escape_ascii());
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(document in proptest::collection::vec(any::<u8>(), 0..100), pointer in ".{0,20}") {
        let _ = scalar_at(&document, &pointer);
    }
}

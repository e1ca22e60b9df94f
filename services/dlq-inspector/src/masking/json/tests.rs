#![expect(
    clippy::disallowed_types,
    reason = "masked documents, which these tests compare"
)]

use proptest::prelude::*;
use redeliver_testkit::fuzz::{FEW, check_each, fuzz};
use redeliver_testkit::valid_json;

use super::*;

fn paths(texts: &[&str]) -> Vec<FieldPath> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn masked(document: &str, texts: &[&str]) -> Option<String> {
    let paths = paths(texts);
    let masked = mask(document.as_bytes(), &paths.iter().collect::<Vec<_>>())?;
    Some(String::from_utf8(masked.text).unwrap())
}

#[test]
fn values_at_the_paths_are_masked() {
    for (document, path, expected) in [
        (
            r#"{ "pan" : 4111 , "a":1.50e+3 }"#,
            "/pan",
            r#"{ "pan" : "<masked>" , "a":1.50e+3 }"#,
        ),
        // Duplicates, other notations of the same name, and another case.
        (
            r#"{"pan":1,"pan":[2],"p\u0061n":{"x":3},"PAN":4,"pan2":5}"#,
            "/pan",
            r#"{"pan":"<masked>","pan":"<masked>","p\u0061n":"<masked>","PAN":"<masked>","pan2":5}"#,
        ),
        (
            r#"{"a":[{"b":1},{"b":2},3]}"#,
            "/a/*/b",
            r#"{"a":[{"b":"<masked>"},{"b":"<masked>"},3]}"#,
        ),
        (r#"[[0,1],[2,3]]"#, "/1/0", r#"[[0,1],["<masked>",3]]"#),
        (r#"{"1":{"0":true}}"#, "/1/0", r#"{"1":{"0":"<masked>"}}"#),
        (
            r#"{"b":1,"a":{"b":{"c":2},"x":[{"b":3}]}}"#,
            "/**/b",
            r#"{"b":"<masked>","a":{"b":"<masked>","x":[{"b":"<masked>"}]}}"#,
        ),
        (
            r#"{"a":{"x":{"c":1},"c":2}}"#,
            "/a/**/c",
            r#"{"a":{"x":{"c":"<masked>"},"c":"<masked>"}}"#,
        ),
        (
            r#"{"a/b":{"~":1,"":2}}"#,
            "/a~1b/~0",
            r#"{"a/b":{"~":"<masked>","":2}}"#,
        ),
        (r#"{"a":{"":2}}"#, "/a/", r#"{"a":{"":"<masked>"}}"#),
        (
            r#" ["]", {"a":"\"}\\"}] "#,
            "/1/a",
            r#" ["]", {"a":"<masked>"}] "#,
        ),
        (
            r#"{"a":123456789012345678901234567890.10}"#,
            "/b",
            r#"{"a":123456789012345678901234567890.10}"#,
        ),
        ("{}", "/**", "\"<masked>\""),
        ("[ ]", "/a", "[ ]"),
    ] {
        assert_eq!(
            masked(document, &[path]).as_deref(),
            Some(expected),
            "{document} {path}"
        );
    }
}

#[test]
fn unreadable_document_is_withheld() {
    let deep = format!("{}1{}", "[".repeat(200), "]".repeat(200));
    for document in [
        "",
        " ",
        "4111",
        "\"{\\\"pan\\\":4111}\"",
        "null",
        r#"{"pan":4111"#,
        r#"{"pan":4111} {"pan":4111}"#,
        "{\"pan\":4111}\n{\"pan\":4111}",
        "{'pan':4111}",
        "{pan:4111}",
        r#"{"pan":4111,}"#,
        r#"{"pan":4111/* */}"#,
        r#"{"pan":NaN}"#,
        r#"{"pan":01}"#,
        "{\"p\u{1}an\":1}",
        r#"{"\ud800":1}"#,
        "\u{feff}{}",
        &deep,
    ] {
        assert_eq!(masked(document, &["/**/pan"]), None, "{document}");
    }
    assert!(mask(b"{\"a\":\"\xff\"}", &[]).is_none());
    // Where no path leads, the depth does not matter.
    let aside = format!(r#"{{"deep":{deep},"pan":1}}"#);
    assert_eq!(
        masked(&aside, &["/pan"]).unwrap(),
        format!(r#"{{"deep":{deep},"pan":"<masked>"}}"#)
    );
}

#[test]
fn found_paths_are_named() {
    let all = paths(&["/a", "/b", "/*/c"]);
    let found = mask(br#"{"a":{"c":1},"d":{"c":2}}"#, &all.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(found.found, [&all[0], &all[2]]);
}

#[test]
fn nested_field_is_masked() {
    let names = |text: &str| -> Vec<String> { text.split('/').skip(1).map(str::to_owned).collect() };
    for (path, pointer, expected) in [
        ("/a", "/a", true),
        ("/a", "/a/b", true),
        ("/a", "/A", true),
        ("/a/b", "/a", false),
        ("/*/b", "/x/b/c", true),
        ("/**/b", "/b", true),
        ("/**/b", "/x/y/b/z", true),
        ("/**/b", "/x/y", false),
    ] {
        let of = path.parse().unwrap();
        assert_eq!(masks(&of, &names(pointer)), expected, "{path} {pointer}");
    }
}

/// A document as it is written.
#[derive(Clone, Debug)]
enum Written {
    /// A scalar.
    Scalar(String),
    Array(Vec<Written>),
    /// The names as they are written, and as they are meant.
    Object(Vec<((String, String), Written)>),
}

impl Written {
    fn text(&self, space: &str) -> String {
        let join = |parts: Vec<String>| parts.join(&format!("{space},{space}"));
        match self {
            Self::Scalar(text) => text.clone(),
            Self::Array(elements) => {
                let elements = elements.iter().map(|element| element.text(space));
                format!("[{space}{}{space}]", join(elements.collect()))
            }
            Self::Object(members) => {
                let members = members.iter();
                let members = members
                    .map(|((written, _), value)| format!("{written}{space}:{space}{}", value.text(space)));
                format!("{{{space}{}{space}}}", join(members.collect()))
            }
        }
    }

    /// The slow way: each place compares all names that lead to it with each path.
    fn masked(&self, paths: &[Vec<String>], way: &[String]) -> Self {
        if paths.iter().any(|path| is_at(path, way)) {
            return Self::Scalar(format!("\"{MASK}\""));
        }
        let below = |name: &str| [way, &[name.to_owned()]].concat();
        match self {
            Self::Scalar(text) => Self::Scalar(text.clone()),
            Self::Array(elements) => {
                let elements = elements.iter().enumerate();
                let elements =
                    elements.map(|(index, element)| element.masked(paths, &below(&index.to_string())));
                Self::Array(elements.collect())
            }
            Self::Object(members) => {
                let members = members.iter();
                let members = members
                    .map(|(name, value)| (name.clone(), value.masked(paths, &below(&name.1))))
                    .collect();
                Self::Object(members)
            }
        }
    }
}

/// Whether a path leads to a place.
fn is_at(path: &[String], way: &[String]) -> bool {
    match (path.split_first(), way.split_first()) {
        (None, None) => true,
        (None, Some(_)) => false,
        (Some((step, rest)), _) if step == "**" => {
            (0..=way.len()).any(|skipped| is_at(rest, &way[skipped..]))
        }
        (Some(_), None) => false,
        (Some((step, rest)), Some((name, after))) => {
            (step == "*" || step.to_lowercase() == name.to_lowercase()) && is_at(rest, after)
        }
    }
}

/// A name, sometimes with an escape.
fn name() -> impl Strategy<Value = (String, String)> {
    let names = prop::sample::select(vec!["a", "b", "A", "0", "c\"", ""]);
    (names, any::<bool>()).prop_map(|(name, is_escaped)| {
        let written: String = if is_escaped {
            name.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect()
        } else {
            name.replace('"', "\\\"")
        };
        (format!("\"{written}\""), name.to_owned())
    })
}

fn written() -> impl Strategy<Value = Written> {
    let scalars = [
        "null",
        "true",
        "-1.0e-7",
        "12345678901234567890123",
        "\"\"",
        r#""}\\\"]""#,
        "\"/a\"",
    ];
    let leaf = prop::sample::select(scalars.to_vec()).prop_map(|text| Written::Scalar(text.to_owned()));
    leaf.prop_recursive(4, 40, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Written::Array),
            prop::collection::vec((name(), inner), 0..4).prop_map(Written::Object),
        ]
    })
}

fn path() -> impl Strategy<Value = Vec<String>> {
    let steps = ["a", "b", "0", "1", "*", "**", "c\"", ""];
    prop::collection::vec(prop::sample::select(steps.to_vec()).prop_map(str::to_owned), 1..4)
}

proptest! {
    #[test]
    fn masking_follows_the_model(
        document in written(),
        model in prop::collection::vec(path(), 0..4),
        space in prop::sample::select(vec!["", " ", "\n\t"]),
    ) {
        let text = document.text(space);
        let paths: Vec<FieldPath> = model.iter().map(|path| format!("/{}", path.join("/")).parse().unwrap()).collect();
        let masked = mask(text.as_bytes(), &paths.iter().collect::<Vec<_>>());
        let Some(masked) = masked else {
            prop_assert!(matches!(document, Written::Scalar(_)), "{}", text);
            return Ok(());
        };
        let expected = document.masked(&model, &[]).text(space);
        prop_assert_eq!(String::from_utf8(masked.text).unwrap(), expected);
    }
}

/// Whatever is damaged, a parser finds no member of this name that is not masked.
fn damaged_documents(count: u32) {
    let valid: Vec<Vec<u8>> = [
        r#"{"pan":"5ecret","a":[{"pan":"5ecret"},{"p\u0061n":{"x":"5ecret"}}]}"#,
        r#"[{"a":{"b":[1,2,{"PAN":"5ecret"}]}},"\"",{"pan":["5ecret"]}]"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    let paths = paths(&["/**/pan"]);
    let paths: Vec<&FieldPath> = paths.iter().collect();
    fuzz("damaged_documents", count, &valid, |input| {
        let Some(masked) = mask(input, &paths) else {
            return;
        };
        match serde_json::from_slice(&masked.text) {
            Ok(parsed) => assert_masked(&parsed),
            // JSON allows larger numbers than this parser.
            Err(error) => assert!(error.to_string().starts_with("number out of range"), "{error}"),
        }
        // What is masked is masked only once.
        let again = mask(&masked.text, &paths).unwrap();
        assert_eq!(again.text, masked.text);
    });
}

/// All members of this name are masked. Damage may have changed other names.
fn assert_masked(value: &serde_json::Value) {
    match value {
        serde_json::Value::Object(members) => {
            for (name, value) in members {
                if name.eq_ignore_ascii_case("pan") {
                    assert_eq!(*value, "<masked>");
                }
                assert_masked(value);
            }
        }
        serde_json::Value::Array(elements) => {
            for element in elements {
                assert_masked(element);
            }
        }
        _ => {}
    }
}

#[test]
fn damaged_document_is_masked_or_withheld() {
    damaged_documents(10_000);
}

#[test]
#[ignore = "long"]
fn many_damaged_documents_show_no_secrets() {
    damaged_documents(1_000_000);
}

/// Valid documents are masked, and withheld only if a name is half of a surrogate pair or they are too deep to look for names.
#[test]
fn valid_documents_are_masked() {
    let paths = paths(&["/**/pan"]);
    let paths: Vec<&FieldPath> = paths.iter().collect();
    let document = |random: &mut fastrand::Rng| {
        let inner = valid_json::object(random, &[("pan", "5501e400")]);
        valid_json::object(random, &[("a", &inner), ("pan", "[5501e400]")]).into_bytes()
    };
    check_each("valid_documents", FEW, document, |input| {
        let text = std::str::from_utf8(input).unwrap();
        let Some(masked) = mask(input, &paths) else {
            assert!(
                text.contains(r"\ud") || text.contains(&"[".repeat(MAX_DEPTH - 8)),
                "{text}"
            );
            return;
        };
        let masked = std::str::from_utf8(&masked.text).unwrap();
        serde_json::from_str::<IgnoredAny>(masked).unwrap();
        assert!(
            !masked.contains("5501e400") && masked.matches("<masked>").count() == 2,
            "{masked}"
        );
        let unmasked = [r#""<masked>""#, "[5501e400]", "5501e400"]
            .iter()
            .fold(masked.to_owned(), |text, part| text.replace(part, ""));
        let expected = ["[5501e400]", "5501e400"]
            .iter()
            .fold(text.to_owned(), |text, part| text.replace(part, ""));
        assert_eq!(unmasked, expected);
    });
}

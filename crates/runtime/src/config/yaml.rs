//! Parsing YAML into a tree.

use std::collections::HashMap;
use std::sync::Arc;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, Tag};

use super::error::ConfigError;
use super::tree::{Node, Origin, Value};

const MAX_DEPTH: usize = 32;
/// Limits expansion: aliases of aliases grow exponentially.
const MAX_NODES: usize = 100_000;

/// Parses one YAML document. An empty document is an empty mapping. Errors refer to the text by `name`.
pub(super) fn parse(text: &str, name: &str) -> Result<Node, ConfigError> {
    let name: Arc<str> = name.into();
    let place = |line| Origin::File(name.clone(), line);
    parse_at(text, &place).map_err(|error| ConfigError::Syntax {
        place: place(error.line).to_string(),
        problem: error.problem,
    })
}

/// Parses the text of an environment variable or a flag. Every node gets the same origin.
pub(super) fn parse_inline(text: &str, origin: &Origin) -> Result<Node, String> {
    parse_at(text, &|_| origin.clone()).map_err(|error| error.problem)
}

struct SyntaxError {
    line: usize,
    problem: String,
}

impl From<ScanError> for SyntaxError {
    fn from(error: ScanError) -> Self {
        Self {
            line: error.marker().line(),
            problem: format!("invalid YAML: {}", error.kind()),
        }
    }
}

/// A list or mapping whose end event has not arrived yet.
struct OpenCollection {
    node: Node,
    anchor: usize,
    /// In a mapping, the key whose value comes next.
    key: Option<String>,
}

fn parse_at(text: &str, place: &dyn Fn(usize) -> Origin) -> Result<Node, SyntaxError> {
    let mut builder = Builder {
        open: Vec::new(),
        anchors: HashMap::new(),
        nodes: 0,
        root: None,
    };
    // A file may begin with byte order marks.
    for event in Parser::new_from_str(text.trim_start_matches('\u{feff}')) {
        let (event, span) = event?;
        builder.accept(event, &span, place)?;
    }
    let root = builder.root.unwrap_or_else(|| Node::new(Value::Null, place(1)));
    Ok(match root.value {
        Value::Null | Value::Empty => Node::new(Value::Map(Vec::new()), root.origin),
        _ => root,
    })
}

struct Builder {
    open: Vec<OpenCollection>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    root: Option<Node>,
}

impl Builder {
    fn accept(
        &mut self,
        event: Event<'_>,
        span: &Span,
        place: &dyn Fn(usize) -> Origin,
    ) -> Result<(), SyntaxError> {
        let line = span.start.line();
        let error = |problem: &str| SyntaxError {
            line,
            problem: problem.to_owned(),
        };
        match event {
            Event::DocumentStart(..) if self.root.is_some() => {
                return Err(error("more than one YAML document; write a single one"));
            }
            Event::Scalar(text, style, anchor, tag) => {
                let is_null =
                    style == ScalarStyle::Plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
                let tagged_text = has_tag(tag.as_deref(), "str").map_err(|problem| error(&problem))?;
                let value = if is_null && !tagged_text {
                    if span.is_empty() {
                        Value::Empty
                    } else {
                        Value::Null
                    }
                } else if style == ScalarStyle::Plain && !tagged_text {
                    Value::Plain(text.into_owned())
                } else {
                    Value::Scalar(text.into_owned())
                };
                self.finish(Node::new(value, place(line)), anchor, line)?;
            }
            Event::SequenceStart(_, anchor, tag) => {
                has_tag(tag.as_deref(), "seq").map_err(|problem| error(&problem))?;
                self.begin(Node::new(Value::List(Vec::new()), place(line)), anchor, line)?;
            }
            Event::MappingStart(_, anchor, tag) => {
                has_tag(tag.as_deref(), "map").map_err(|problem| error(&problem))?;
                self.begin(Node::new(Value::Map(Vec::new()), place(line)), anchor, line)?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(closed) = self.open.pop() else {
                    return Err(error("unexpected end of a list or mapping"));
                };
                self.finish(closed.node, closed.anchor, line)?;
            }
            Event::Alias(anchor) => {
                let node = self.anchors.get(&anchor).cloned();
                let node = node.ok_or_else(|| error("an alias refers to a value that contains it"))?;
                self.nodes += count(&node);
                self.finish(node, 0, line)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, node: Node, anchor: usize, line: usize) -> Result<(), SyntaxError> {
        if self.open.len() >= MAX_DEPTH {
            let problem = format!("nested more than {MAX_DEPTH} levels deep");
            return Err(SyntaxError { line, problem });
        }
        if self
            .open
            .last()
            .is_some_and(|open| matches!(open.node.value, Value::Map(_)) && open.key.is_none())
        {
            return Err(SyntaxError {
                line,
                problem: "a key is not a string".to_owned(),
            });
        }
        self.open.push(OpenCollection {
            node,
            anchor,
            key: None,
        });
        Ok(())
    }

    fn finish(&mut self, node: Node, anchor: usize, line: usize) -> Result<(), SyntaxError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(SyntaxError {
                line,
                problem: format!("more than {MAX_NODES} values"),
            });
        }
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match (&mut open.node.value, open.key.take()) {
            (Value::List(items), _) => items.push(node),
            (Value::Map(entries), Some(key)) => entries.push((key, node)),
            (Value::Map(entries), None) => {
                let key = match node.value {
                    Value::Scalar(text) | Value::Plain(text) => text,
                    Value::Null | Value::Empty => "null".to_owned(),
                    _ => {
                        return Err(SyntaxError {
                            line,
                            problem: "a key is not a string".to_owned(),
                        });
                    }
                };
                if entries.iter().any(|(name, _)| *name == key) {
                    return Err(SyntaxError {
                        line,
                        problem: format!("duplicate key `{key}`"),
                    });
                }
                open.key = Some(key);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether a value has the standard tag `allowed`. Other tags are errors.
fn has_tag(tag: Option<&Tag>, allowed: &str) -> Result<bool, String> {
    match tag {
        None => Ok(false),
        Some(tag) if tag.core_suffix() == Some(allowed) => Ok(true),
        Some(tag) => Err(format!("unsupported tag `{}`; remove it", tag.original())),
    }
}

fn count(node: &Node) -> usize {
    match &node.value {
        Value::List(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|(_, node)| count(node)).sum::<usize>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problem(text: &str) -> String {
        parse(text, "f.yaml").unwrap_err().to_string()
    }

    #[test]
    fn scalars_keep_text_and_line() {
        let tree = parse("a: 1.10\nb:\n  c: \"null\"\n  d: ~\n", "f.yaml").unwrap();
        let text = |path: &[&str]| match &tree.at(&super::super::tree::Path::of(path)).unwrap().value {
            Value::Scalar(text) | Value::Plain(text) => Some(text.clone()),
            _ => None,
        };
        assert_eq!(text(&["a"]).as_deref(), Some("1.10"));
        assert_eq!(text(&["b", "c"]).as_deref(), Some("null"));
        assert_eq!(text(&["b", "d"]), None);
        assert_eq!(
            tree.get("b").unwrap().get("c").unwrap().origin.to_string(),
            "f.yaml line 3"
        );
    }

    #[test]
    fn empty_file_is_empty_mapping() {
        for empty in ["", "# only a comment\n", "---\n", "\u{feff}"] {
            assert!(matches!(parse(empty, "f").unwrap().value, Value::Map(entries) if entries.is_empty()));
        }
        let tree = parse("a: &x [1, 2]\nb: *x\n", "f").unwrap();
        assert!(matches!(&tree.get("b").unwrap().value, Value::List(items) if items.len() == 2));
    }

    #[test]
    fn unsupported_yaml_names_its_line() {
        assert!(
            problem("a: [1, 2\nb: 3\n").starts_with("f.yaml line "),
            "{}",
            problem("a: [1, 2\nb: 3\n")
        );
        assert_eq!(problem("a: 1\nb: 2\na: 3\n"), "f.yaml line 3: duplicate key `a`");
        assert_eq!(
            problem("a: !secret x\n"),
            "f.yaml line 1: unsupported tag `!secret`; remove it"
        );
        assert_eq!(
            problem("a: 1\n---\nb: 2\n"),
            "f.yaml line 2: more than one YAML document; write a single one"
        );
        assert_eq!(problem("? [1]\n: 2\n"), "f.yaml line 1: a key is not a string");
    }

    #[test]
    fn aliases_and_nesting_are_limited() {
        let mut text = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n".to_owned();
        for n in 1..9 {
            let before = format!("*a{},", n - 1).repeat(10);
            text += &format!("a{n}: &a{n} [{before}]\n");
        }
        assert!(problem(&text).contains("more than 100000 values"));
        assert!(problem(&("[".repeat(40) + &"]".repeat(40))).contains("levels deep"));
        // The scanner itself rejects extreme depth.
        assert!(parse(&"[".repeat(100_000), "f").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "[-a-c:\\[\\]{}&*!|>'\"%@`#?,~ \n\t0-9]{0,60}") {
            let _ = parse(&text, "f");
        }
    }
}

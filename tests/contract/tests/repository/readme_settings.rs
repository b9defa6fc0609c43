//! The README's tables of settings are what the programs themselves say with `--help`.

use std::path::Path;

use modelrelay_harness::process::Spawn;

#[tokio::test]
async fn the_readme_lists_the_settings_of_the_relay() {
    assert_listed("relay").await;
}

#[tokio::test]
async fn the_readme_lists_the_settings_of_the_worker() {
    assert_listed("worker").await;
}

async fn assert_listed(program: &str) {
    let mut process = Spawn::program(&format!("modelrelay-{program}")).arg("--help").start();
    assert!(process.wait_exit().await.success());
    process.log().wait_until_closed().await;
    let expected = table(&process.log().lines());

    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let (_, rest) = readme.split_once(&format!("<!-- settings:{program} -->\n")).expect("the opening mark");
    let (listed, _) = rest.split_once(&format!("<!-- /settings:{program} -->")).expect("the closing mark");
    assert!(listed == expected, "README.md must hold this table between the marks settings:{program}:\n\n{expected}");
}

/// The table of all options that a help text describes.
fn table(help: &[String]) -> String {
    let mut rows = String::from("| flag | variable | default | meaning |\n|---|---|---|---|\n");
    for option in options(help) {
        let Setting { flag, variable, default, meaning } = Setting::parse(&option);
        if !["--help", "--version"].contains(&flag.as_str()) {
            rows += &format!("| `{flag}` | {variable} | {default} | {} |\n", meaning.replace('|', "\\|"));
        }
    }
    rows
}

/// The text of each option, its lines joined.
fn options(help: &[String]) -> Vec<String> {
    let lines = help.iter().skip_while(|line| *line != "Options:").skip(1);
    let mut options: Vec<String> = Vec::new();
    for line in lines.take_while(|line| line.is_empty() || line.starts_with(' ')) {
        let text = line.trim();
        match options.last_mut() {
            Some(option) if !text.starts_with('-') => *option += &format!(" {text}"),
            Some(_) | None => options.push(text.to_owned()),
        }
    }
    options
}

struct Setting {
    flag: String,
    variable: String,
    default: String,
    meaning: String,
}

impl Setting {
    /// Reads `-f, --flag <VALUE> meaning [env: NAME=] [default: x] [possible values: …]`.
    fn parse(option: &str) -> Self {
        let start = option.find("--").expect("every option has a long name");
        let (flag, mut rest) = option[start..].split_once(' ').unwrap_or((&option[start..], ""));
        if let Some((_, after)) = rest.trim_start().strip_prefix('<').and_then(|value| value.split_once('>')) {
            rest = after;
        } else if let Some((_, after)) = rest.trim_start().strip_prefix("[<").and_then(|value| value.split_once(">]")) {
            rest = after;
        }
        let mut meaning = rest.to_owned();
        let variable = take_note(&mut meaning, "env").map(|env| code(env.split('=').next().unwrap_or_default()));
        let default = take_note(&mut meaning, "default");
        let default = default.map(|default| if is_value(&default) { code(&default) } else { default });
        Self {
            flag: flag.trim_end_matches(['[', '=']).to_owned(),
            variable: variable.unwrap_or_default(),
            default: default.unwrap_or_default(),
            meaning: one_line(&meaning).trim_end_matches('.').to_owned(),
        }
    }
}

/// Cuts `[name: …]` out of a text.
fn take_note(text: &mut String, name: &str) -> Option<String> {
    let start = text.find(&format!("[{name}: "))?;
    let end = start + text[start..].find(']')?;
    let note = one_line(&text[start + name.len() + 3..end]);
    text.replace_range(start..=end, "");
    Some(note)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a default can be written as it stands; some are told in words.
fn is_value(default: &str) -> bool {
    !default.contains(' ') && default != "none"
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

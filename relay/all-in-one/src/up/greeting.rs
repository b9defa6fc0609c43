//! The text that `up` ends its start with: a line to paste, and addresses for SDKs and browser.

use modelrelay_protocol::names::marked;
use modelrelay_worker::app::shell::Shell;

/// The whole text. `login` states how to log in to the dashboard.
pub(super) fn greeting(url: &str, model: &str, login: &str, shell: Shell) -> String {
    format!(
        "
  ModelRelay is up with model {model}. Try it:

{request}

    OpenAI SDKs:     base URL {url}/v1   (any API key)
    Anthropic SDKs:  base URL {url}      (any API key)
    In a browser:    {url}/dashboard   ({login})

  Stop with Ctrl-C; running responses are finished first.

",
        model = marked(model),
        request = request(url, model, shell),
    )
}

/// A streamed request, as a command of the shell.
fn request(url: &str, model: &str, shell: Shell) -> String {
    let model = json(model, shell);
    let body = format!(r#"{{"model":{model},"stream":true,"messages":[{{"role":"user","content":"Say hello"}}]}}"#);
    let body = shell.word(&body);
    let target = format!("{url}/v1/chat/completions -H 'content-type: application/json'");
    match shell {
        Shell::Posix => format!("    curl -N {target} \\\n      -d {body}"),
        // As an argument the body would lose its quotes in Windows PowerShell 5, and not in PowerShell 7; a pipe works
        // in both.
        Shell::PowerShell => format!("    {body} |\n      curl.exe -N {target} -d '@-'"),
    }
}

/// A JSON string without control characters, which could steer the terminal. Windows PowerShell 5 pipes ASCII only.
fn json(text: &str, shell: Shell) -> String {
    let is_plain = |letter: &char| !letter.is_control() && (shell == Shell::Posix || letter.is_ascii());
    let text = serde_json::Value::from(text).to_string();
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_plain(&letter) {
            escaped.push(letter);
        } else {
            let units =
                letter.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
            escaped.push_str(&units);
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posix_request_quotes_the_model() {
        let text = request("http://127.0.0.1:8080", "it's \"new\"\u{9b}é", Shell::Posix);
        let expected = r#"    curl -N http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \
      -d '{"model":"it'\''s \"new\"\u009bé","stream":true,"messages":[{"role":"user","content":"Say hello"}]}'"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn power_shell_request_pipes_ascii() {
        let text = request("http://127.0.0.1:8080", "it’s \"it's\" 😀", Shell::PowerShell);
        let expected = r#"    '{"model":"it\u2019s \"it''s\" \ud83d\ude00","stream":true,"messages":[{"role":"user","content":"Say hello"}]}' |
      curl.exe -N http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '@-'"#;
        assert_eq!(text, expected);
    }
}

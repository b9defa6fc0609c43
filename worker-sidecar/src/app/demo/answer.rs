//! The text of the demo backend's responses, and where it stops.

use serde_json::Value;

use super::tokens;

/// The longest part of a prompt that is repeated, in characters: an echo of a 32 MiB prompt would stream for days.
const EXCERPT_CHARS: usize = 400;

/// The reason why a response ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finish {
    /// The text was complete.
    End,
    /// This stop string occurred.
    Stop(String),
    /// The limit of tokens was reached.
    Length,
}

/// The limits that a request set; those that it omitted are `None` or empty.
#[derive(Debug, Default)]
pub(super) struct Limits {
    pub(super) max_tokens: Option<u64>,
    pub(super) stop: Vec<String>,
}

impl Limits {
    /// Reads the first of `max_names` that is set, and `stop_name` (a string or a list of strings).
    pub(super) fn read(
        body: &Value,
        max_names: &[&'static str],
        stop_name: &'static str,
    ) -> Result<Self, (&'static str, String)> {
        let given = max_names.iter().find_map(|&name| Some((name, given(&body[name])?)));
        let max_tokens = given
            .map(|(name, value)| match value.as_u64() {
                Some(number) if number > 0 => Ok(number),
                Some(_) | None => Err((name, format!("{name} must be a positive integer"))),
            })
            .transpose()?;
        let refused = || (stop_name, format!("{stop_name} must be a string or a list of strings"));
        let stop = match &body[stop_name] {
            Value::Null => Vec::new(),
            Value::String(stop) => vec![stop.clone()],
            Value::Array(stops) => {
                stops.iter().map(|stop| stop.as_str().map(str::to_owned)).collect::<Option<_>>().ok_or_else(refused)?
            }
            Value::Bool(_) | Value::Number(_) | Value::Object(_) => return Err(refused()),
        };
        Ok(Self { max_tokens, stop })
    }
}

/// One whole response, cut as requested, with its token counts.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) text: String,
    pub(super) finish: Finish,
    pub(super) input_tokens: usize,
    pub(super) output_tokens: usize,
}

impl Completion {
    /// Creates the response to `prompt`; `earlier` is the previous prompt, if it is stored.
    pub(super) fn new(prompt: &Prompt, earlier: Option<&str>, limits: &Limits) -> Self {
        let mut text = compose(&prompt.last, earlier);
        let mut finish = Finish::End;
        let first_stop = limits.stop.iter().filter(|stop| !stop.is_empty());
        if let Some((at, stop)) = first_stop.filter_map(|stop| Some((text.find(stop.as_str())?, stop))).min() {
            text.truncate(at);
            finish = Finish::Stop(stop.clone());
        }
        let allowed = limits.max_tokens.and_then(|max| usize::try_from(max).ok()).unwrap_or(usize::MAX);
        let mut output_tokens = tokens::count(&text);
        if output_tokens > allowed {
            let kept = tokens::pieces(&text).take(allowed).map(str::len).sum();
            text.truncate(kept);
            output_tokens = allowed;
            finish = Finish::Length;
        }
        Self { text, finish, input_tokens: tokens::count(&prompt.all), output_tokens }
    }

    /// Returns the parts that are streamed one after the other.
    pub(super) fn words(&self) -> impl Iterator<Item = &str> {
        tokens::words(&self.text)
    }
}

/// The texts of a request.
#[derive(Debug, Default, Clone)]
pub(super) struct Prompt {
    /// Every text in it, for counting.
    pub(super) all: String,
    /// The user's last text, for repeating.
    pub(super) last: String,
}

impl Prompt {
    /// Creates a prompt that is one text.
    pub(super) fn text(text: &str) -> Self {
        Self { all: text.to_owned(), last: text.to_owned() }
    }

    fn add(&mut self, role: &str, text: &str) {
        if !self.all.is_empty() {
            self.all.push('\n');
        }
        self.all.push_str(text);
        if role == "user" {
            text.clone_into(&mut self.last);
        }
    }
}

/// Returns a field's value, unless it is absent or null, which mean the same.
pub(super) fn given(value: &Value) -> Option<&Value> {
    (!value.is_null()).then_some(value)
}

/// Returns the texts of a `messages` list, or of a Responses `input` list, which contains the same items among others.
pub(super) fn text_of_messages(messages: &Value) -> Result<Prompt, String> {
    let messages = messages.as_array().filter(|messages| !messages.is_empty());
    let mut prompt = Prompt::default();
    for (at, message) in messages.ok_or("expected a list with at least one message")?.iter().enumerate() {
        if message["role"].is_null() && message["type"].is_string() {
            continue; // tool calls and their results have a type and no role
        }
        let role = message["role"].as_str().ok_or_else(|| format!("message {at} has no role"))?;
        prompt.add(role, &text_of_content(&message["content"]));
    }
    Ok(prompt)
}

/// Returns the text of a message's content: a string, or the text parts of a list; images and the like have no text.
pub(super) fn text_of_content(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

fn compose(prompt: &str, earlier: Option<&str>) -> String {
    let prompt = excerpt(prompt);
    let earlier = earlier.map(|earlier| format!("Before, you said: {} — now ", excerpt(earlier))).unwrap_or_default();
    let you = if earlier.is_empty() { "You" } else { "you" };
    let quoted = if prompt.is_empty() { " nothing.".to_owned() } else { format!(": {prompt}") };
    format!("This is ModelRelay's built-in demo backend, not a model. {earlier}{you} said{quoted}")
}

fn excerpt(text: &str) -> String {
    let text = text.trim();
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(prompt: &str, limits: &Limits) -> Completion {
        Completion::new(&Prompt::text(prompt), None, limits)
    }

    #[test]
    fn response_names_demo_backend_and_repeats_prompt() {
        let plain = answer("hello there", &Limits::default());
        assert_eq!(plain.text, "This is ModelRelay's built-in demo backend, not a model. You said: hello there");
        assert_eq!(plain.finish, Finish::End);
        let silent = answer("  ", &Limits::default());
        assert!(silent.text.ends_with("not a model. You said nothing."), "{}", silent.text);
        let second = Completion::new(&Prompt::text("two"), Some("one"), &Limits::default());
        assert!(second.text.ends_with("not a model. Before, you said: one — now you said: two"), "{}", second.text);
    }

    #[test]
    fn long_prompt_is_excerpted_but_counted_whole() {
        let long = "日本 ".repeat(100_000);
        let answer = answer(&long, &Limits::default());
        assert!(answer.text.ends_with('…') && answer.text.chars().count() < EXCERPT_CHARS + 100);
        assert!(answer.input_tokens >= 100_000);
    }

    #[test]
    fn max_tokens_cuts_and_is_counted() {
        let cut = answer("hello", &Limits { max_tokens: Some(3), stop: Vec::new() });
        assert_eq!((cut.text.as_str(), cut.finish, cut.output_tokens), ("This is Model", Finish::Length, 3));
        let whole = answer("hello", &Limits { max_tokens: Some(1000), stop: Vec::new() });
        assert_eq!(whole.finish, Finish::End);
    }

    #[test]
    fn earliest_stop_string_ends_response() {
        let limits = Limits { max_tokens: None, stop: vec!["said".into(), String::new(), " not".into()] };
        let cut = answer("hello", &limits);
        assert_eq!(cut.text, "This is ModelRelay's built-in demo backend,");
        assert_eq!(cut.finish, Finish::Stop(" not".into()));
    }

    #[test]
    fn limits_of_wrong_type_are_refused_by_name() {
        let read = |body: Value| Limits::read(&body, &["max_completion_tokens", "max_tokens"], "stop");
        assert_eq!(read(json!({"max_tokens": 0})).unwrap_err().0, "max_tokens");
        assert_eq!(read(json!({"max_completion_tokens": "9"})).unwrap_err().0, "max_completion_tokens");
        assert_eq!(read(json!({"stop": [1]})).unwrap_err().0, "stop");
        let limits = read(json!({"max_completion_tokens": 5, "max_tokens": 7, "stop": "x"})).unwrap();
        assert_eq!((limits.max_tokens, limits.stop), (Some(5), vec!["x".to_owned()]));
    }

    #[test]
    fn messages_yield_last_user_text_and_all_texts() {
        let prompt = text_of_messages(&json!([
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "first"},
            {"role": "user", "content": [{"type": "text", "text": "second"}, {"type": "image_url", "image_url": {}}]},
            {"role": "assistant", "content": null},
            {"type": "function_call_output", "output": "42"},
        ]))
        .unwrap();
        assert_eq!(prompt.last, "second");
        assert_eq!(prompt.all, "be kind\nfirst\nsecond\n");
        assert!(text_of_messages(&json!([])).is_err());
        assert!(text_of_messages(&json!([{"content": "who?"}])).is_err());
    }
}

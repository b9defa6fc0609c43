//! Fields of a log line: the text of [`DefaultVisitor`], without colours at a fraction of its cost. It styles each name
//! and sign, also where there is no style, and examines each character of a text twice.

use std::fmt::{self, Debug};

use tracing::field::{Field, Visit};
use tracing_subscriber::field::{RecordFields, VisitOutput};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, DefaultVisitor, Writer};

/// Formats fields as `name=value`, for [`fmt_fields`](tracing_subscriber::fmt::Layer::fmt_fields).
#[derive(Debug)]
pub struct LineFields(());

impl LineFields {
    /// Returns the formatter.
    #[must_use]
    pub fn new() -> Self {
        Self(())
    }
}

impl Default for LineFields {
    fn default() -> Self {
        Self::new()
    }
}

impl<'writer> FormatFields<'writer> for LineFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        if writer.has_ansi_escapes() {
            return DefaultFields::new().format_fields(writer, fields);
        }
        let mut fields_writer = FieldWriter { writer, is_empty: true, result: Ok(()) };
        fields.record(&mut fields_writer);
        fields_writer.result
    }
}

/// Writes the fields of one line.
#[derive(Debug)]
struct FieldWriter<'writer> {
    writer: Writer<'writer>,
    is_empty: bool,
    result: fmt::Result,
}

impl FieldWriter<'_> {
    /// Writes `name=` and then the value, unless an earlier field failed.
    fn field(&mut self, name: &str, value: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        if self.result.is_ok() {
            let separator = if self.is_empty { "" } else { " " };
            self.is_empty = false;
            self.result = [separator, name, "="].iter().try_for_each(|part| self.writer.write_str(part));
            self.result = self.result.and_then(|()| value(&mut self.writer));
        }
    }

    /// Leaves a field to the visitor of the library.
    fn visit(&mut self, record: impl FnOnce(&mut DefaultVisitor<'_>)) {
        if self.result.is_ok() {
            let mut visitor = DefaultVisitor::new(self.writer.by_ref(), self.is_empty);
            record(&mut visitor);
            self.result = visitor.finish();
            self.is_empty = false;
        }
    }

    fn digits(&mut self, field: &Field, sign: &str, mut number: u64) {
        let mut digits = [b'0'; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] += (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        let digits = str::from_utf8(&digits[first..]).unwrap_or_default();
        self.field(field.name(), |writer| writer.write_str(sign).and_then(|()| writer.write_str(digits)));
    }
}

impl Visit for FieldWriter<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if is_usual(field) {
            self.digits(field, "", value);
        } else {
            self.visit(|visitor| visitor.record_u64(field, value));
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        if is_usual(field) {
            self.digits(field, if value < 0 { "-" } else { "" }, value.unsigned_abs());
        } else {
            self.visit(|visitor| visitor.record_i64(field, value));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let is_plain = value.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\');
        if is_plain && is_usual(field) {
            self.field(field.name(), |writer| ["\"", value, "\""].iter().try_for_each(|part| writer.write_str(part)));
        } else {
            self.visit(|visitor| visitor.record_str(field, value));
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.visit(|visitor| visitor.record_error(field, value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if is_usual(field) {
            self.field(field.name(), |writer| write!(writer, "{value:?}"));
        } else {
            self.visit(|visitor| visitor.record_debug(field, value));
        }
    }
}

/// True for all but the message, which has no name in the line, the library's own fields, and names that are keywords
/// of Rust.
fn is_usual(field: &Field) -> bool {
    let name = field.name();
    name != "message" && !name.starts_with("r#") && !name.starts_with("log.")
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex, PoisonError};

    use tracing::subscriber::with_default;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::registry;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()).unwrap()
        }
    }

    /// Returns the lines of the library, and those of this formatter.
    fn both(is_coloured: bool, log: impl Fn()) -> [String; 2] {
        let (library, own) = (Lines::default(), Lines::default());
        let (left, right) = (library.clone(), own.clone());
        let layer = tracing_subscriber::fmt::layer().with_ansi(is_coloured).without_time();
        with_default(registry().with(layer.with_writer(move || left.clone())), &log);
        let layer = tracing_subscriber::fmt::layer().with_ansi(is_coloured).without_time();
        with_default(registry().with(layer.fmt_fields(LineFields::new()).with_writer(move || right.clone())), &log);
        [library.text(), own.text()]
    }

    #[test]
    fn line_equals_the_librarys_for_every_kind_of_field() {
        let log = || {
            let texts =
                ["", "plain", "two words", "a\"b", "a\\b", "é", "a\nb", "\u{1b}[31mred", "\u{7f}", "\u{9b}31m", "~ !"];
            for text in texts {
                tracing::info!(text, shown = %text, quoted = ?text, "message {text}");
                tracing::warn!(target: "other", only = text);
            }
            for number in [0, 1, 9, 10, 99, 100, u64::from(u32::MAX), u64::MAX] {
                tracing::info!(number, "number");
                tracing::info!(signed = number as i64, "signed");
            }
            tracing::info!(
                least = i64::MIN,
                flag = true,
                ratio = 0.25,
                wide = u128::MAX,
                none = None::<u64>,
                some = Some("x")
            );
            let source = io::Error::other(fmt::Error);
            let error: &(dyn std::error::Error + 'static) = &source;
            tracing::error!(error, r#type = "keyword", list = ?[1, 2], "failed");
            tracing::info!(r#type = 5_u64, r#match = -5_i64, message = 7_u64);
            tracing::debug!("no fields");
        };
        for is_coloured in [false, true] {
            let [library, own] = both(is_coloured, log);
            assert!(own.lines().count() > 30, "{own}");
            assert_eq!((own.contains("\u{1b}[3m"), own), (is_coloured, library));
        }
    }
}

//! Text for old peers: the output is the input, cut at character boundaries, and the verdict is that of the whole.

#![no_main]

use libfuzzer_sys::fuzz_target;
use modelrelay_fuzz::Cuts;
use modelrelay_protocol::text::Utf8Chunker;

/// The longest incomplete character.
const MOST_HELD: usize = 3;

fuzz_target!(|input: (Cuts, &[u8])| {
    let (cuts, bytes) = input;
    let mut chunker = Utf8Chunker::new();
    let (mut fed, mut joined) = (0, String::new());
    let mut verdict = Ok(());
    for piece in cuts.of(bytes) {
        match chunker.push(piece) {
            Ok(text) => joined += &text,
            Err(error) => {
                verdict = Err(error);
                break;
            }
        }
        fed += piece.len();
        assert!(bytes[..fed].starts_with(joined.as_bytes()));
        assert!(fed - joined.len() <= MOST_HELD, "{} bytes are held back", fed - joined.len());
    }
    let verdict = verdict.and_then(|()| chunker.finish());
    assert_eq!(verdict.is_ok(), std::str::from_utf8(bytes).is_ok());
    if verdict.is_ok() {
        assert_eq!(joined.as_bytes(), bytes);
    }
});

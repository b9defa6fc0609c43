//! The class of a request: how urgent it is among the requests of all keys.

use http::HeaderMap;
use modelrelay_protocol::error::{ApiError, ErrorKind};

use crate::dispatch::{Class, ShareError};

/// The header by which a client lowers the class of a request.
const CLASS_HEADER: &str = "x-modelrelay-class";

/// Returns the class of a request whose key has the class `of_key`. The header can lower it, and has no effect if it
/// states a higher one: a client library may send the same header with every key. Of several headers, the lowest class
/// applies.
pub fn of_request(headers: &HeaderMap, of_key: Class) -> Result<Class, ApiError> {
    headers.get_all(CLASS_HEADER).iter().try_fold(of_key, |class, value| {
        let stated = value.to_str().ok().and_then(|name| name.trim().parse().ok());
        let invalid = || {
            let value = String::from_utf8_lossy(value.as_bytes());
            let message = format!("{CLASS_HEADER}: {value:?} is not a class; it must {}", ShareError::Class);
            ApiError::new(ErrorKind::InvalidClass, message)
        };
        Ok(class.max(stated.ok_or_else(invalid)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn class(values: &[&'static str], of_key: Class) -> Result<Class, String> {
        let header = |value: &&'static str| (HeaderName::from_static(CLASS_HEADER), HeaderValue::from_static(value));
        let mut headers = HeaderMap::new();
        headers.extend(values.iter().map(header));
        of_request(&headers, of_key).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn header_lowers_class_and_cannot_raise_it() {
        use Class::{Batch, Interactive, Normal};
        for (values, of_key, expected) in [
            (&[][..], Normal, Normal),
            (&["batch"], Normal, Batch),
            (&["interactive"], Normal, Normal),
            (&["normal"], Batch, Batch),
            (&[" normal "], Interactive, Normal),
            (&["interactive", "batch"], Interactive, Batch),
        ] {
            assert_eq!(class(values, of_key), Ok(expected), "{values:?}");
        }
    }

    #[test]
    fn invalid_class_names_value_and_allowed_ones() {
        for value in ["urgent", "", "Batch", "batch, normal"] {
            let message = class(&[value], Class::Normal).unwrap_err();
            assert!(
                message.contains(&format!("{value:?}")) && message.contains("interactive, normal or batch"),
                "{message}"
            );
        }
    }
}

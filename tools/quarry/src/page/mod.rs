//! The status page of a meta node: the whole cluster at a glance, for whoever reaches the admin port.
//!
//! Three static files, served as they are written here, and one JSON document that they ask for again and again. The page loads nothing from
//! elsewhere and its policy says so to the browser; what nodes say is put into it as text, never as markup. It changes nothing.

mod gather;
mod view;

pub(crate) use gather::Gathered;

use axum::{
    Router,
    http::{
        HeaderName,
        header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS},
    },
    response::IntoResponse,
    routing::get,
};

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Nothing comes from anywhere but this port, nothing is run that stands in the page itself, nobody frames it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The static part.
pub(crate) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(|| async { file("text/html; charset=utf-8", HTML) }))
        .route("/page.css", get(|| async { file("text/css; charset=utf-8", STYLE) }))
        .route("/page.js", get(|| async { file("text/javascript; charset=utf-8", SCRIPT) }))
}

fn file(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 5] = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // A node of another build may answer the next time.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_nothing_from_elsewhere() {
        for text in [HTML, STYLE, SCRIPT] {
            for address in ["http:", "https:", "//cdn", "@import", "url("] {
                assert!(!text.contains(address), "{address}");
            }
        }
    }

    #[test]
    fn what_nodes_say_is_never_taken_for_markup_or_code() {
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "setAttribute(\"on",
        ] {
            assert!(!SCRIPT.contains(way), "{way}");
        }
        assert!(!HTML.contains("<style") && !HTML.contains(" style=") && !HTML.contains(" onload="));
    }

    #[test]
    fn every_element_that_the_script_looks_for_is_in_the_page() {
        let asked = SCRIPT.split("byId(\"").skip(1).filter_map(|rest| rest.split_once('"')).map(|(id, _)| id);
        let asked: Vec<&str> = asked.collect();
        assert!(asked.len() > 5, "{asked:?}");
        for id in asked {
            assert!(HTML.contains(&format!("id=\"{id}\"")), "{id}");
        }
    }
}

document.getElementById("words").textContent = "what it was told";

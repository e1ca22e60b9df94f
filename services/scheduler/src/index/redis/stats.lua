-- KEYS[1] meta  [2] due
-- ARGV[1] now, ms  [2] number of minutes
-- Returns nothing for an empty shard. Otherwise: the number of scheduled jobs, of due jobs, the first due time, and the number
-- of jobs for each minute from now on.
if redis.call('HEXISTS', KEYS[1], 'offset') == 0 then
  return {}
end
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
local found = {
  redis.call('ZCARD', KEYS[2]),
  redis.call('ZCOUNT', KEYS[2], '-inf', ARGV[1]),
  first[2] or false,
}
for minute = 1, tonumber(ARGV[2]) do
  local start = tonumber(ARGV[1]) + (minute - 1) * 60000
  found[3 + minute] =
    redis.call('ZCOUNT', KEYS[2], string.format('(%.0f', start), string.format('%.0f', start + 60000))
end
return found
